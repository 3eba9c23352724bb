import { RankwiseError, type Shape } from '@rankwise/core'
import type { OnnxModel, OnnxValueInfo } from '../onnx/model.ts'

/** A RankwiseError `ORT_COMPILE` that says where in the model ONNX Runtime gave up */
export function compileError(model: OnnxModel, cause: unknown): RankwiseError {
  return sessionError('ORT_COMPILE', 'ONNX Runtime cannot load the graph of a segment', model, cause)
}

/** A RankwiseError `ORT_RUN` that says where in the model ONNX Runtime failed. */
export function runError(model: OnnxModel, cause: unknown): RankwiseError {
  return sessionError('ORT_RUN', 'ONNX Runtime failed in a segment', model, cause)
}

/** A RankwiseError `ORT_SHAPE`. */
export function shapeError({ name, shape }: OnnxValueInfo, computed: Shape): RankwiseError {
  return new RankwiseError('ORT_SHAPE', 'a segment computes another shape than its graph says', {
    where: name,
    actual: { computed, graph: shape },
  })
}

function sessionError(code: string, what: string, model: OnnxModel, cause: unknown): RankwiseError {
  const message = messageOf(cause)
  return new RankwiseError(code, `${what}: ${message}`, { where: placeOf(model, message), cause })
}

/** What ONNX Runtime says. */
export function messageOf(cause: unknown): string {
  return cause instanceof Error ? cause.message : String(cause)
}

/** The module whose node the message names; else the modules of the graph. */
function placeOf({ nodes }: OnnxModel, message: string): string {
  // Names end in a number, so the longest that occurs is the one that is meant.
  const [named] = nodes.filter(({ name }) => message.includes(name)).sort((a, b) => b.name.length - a.name.length)
  const paths = [...new Set((named === undefined ? nodes : [named]).map(({ path }) => path || '(model)'))]
  return paths.length > 4 ? `${paths[0]} … ${paths.at(-1)} (${paths.length} modules)` : paths.join(', ')
}

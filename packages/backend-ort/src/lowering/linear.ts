import { join, toFloat32 } from './operand.ts'
import type { LoweringContext, LoweringRules, Operand, Parts } from './rule.ts'

/**
 * One GEMM over all rows of x for each tile of torch's `[out, in]` weight, which it reads as it lies. What the tiles give
 * are parts of the result along its last dimension.
 */
function linear({ onnx }: LoweringContext<object>, x: Operand, weight: Operand): readonly Parts[] {
  const multiply = (tile: string) => onnx.op('com.microsoft.FusedMatMul', [x.name, tile], { transB: { i: 1 } })
  const parts = weight.parts.parts.map(({ name, size }) => ({ name: multiply(name), size }))
  return [{ dim: x.shape.length - 1, parts }]
}

type EmbeddingAttributes = { readonly before?: number; readonly after?: number }

/** Rows are looked up before they are cast: a table has many more than a prompt has tokens. */
function embedding(
  { onnx, attributes: { before = 0, after = 0 } }: LoweringContext<EmbeddingAttributes>,
  ids: Operand,
  table: Operand,
): readonly string[] {
  const [entries] = table.shape as [number, number]
  // Gather counts negative ids from the end. Here they are errors, as every other id outside of the table.
  const isNegative = onnx.op('Less', [ids.name, onnx.constant('int32', [], Int32Array.of(0))])
  const outside = onnx.constant('int32', [], Int32Array.of(entries))
  const index = onnx.op('Where', [isNegative, outside, ids.name])
  const stored = table.stored ?? { ...table.parts, dtype: 'float32' }
  // Only a table beyond 4 GiB has several parts.
  const rows = onnx.op('Gather', [join(onnx, stored), index])
  const found = toFloat32(onnx, rows, stored.dtype)
  if (before === 0 && after === 0) return [found]
  const outer = ids.shape.map(() => 0)
  return [onnx.op('Pad', [found, onnx.integers([...outer, before, ...outer, after])])]
}

export const linearRules: LoweringRules = { linear, embedding }

import { RankwiseError } from './errors.ts'
import { type Module, ModuleList } from './module.ts'
import { Embedding } from './nn/embedding.ts'
import { Linear } from './nn/linear.ts'
import type { Parameter } from './parameter.ts'
import { headsDivide, partsOf } from './placement.ts'
import {
  type LinearPlacement,
  type ParallelStyle,
  type ParameterPlacement,
  placeEmbedding,
  placeLinear,
} from './styles.ts'
import { textOf } from './value-text.ts'

/**
 * Which Linears and Embeddings of a model are split, and how. A key is a module path relative to the model with at most one `*`,
 * which stands for every index of a ModuleList: `transformer_blocks.*.attn.to_q`. What no key names is replicated.
 */
export type TensorParallelPlan = Readonly<Record<string, ParallelStyle>>

/** Placements of all split parameters by name. */
export type ParameterPlacements = ReadonlyMap<string, ParameterPlacement>

/**
 * Resolves a plan against a model. Reads nothing but shapes.
 *
 * @throws RankwiseError `PLAN_WILDCARDS`, `PLAN_WILDCARD_LIST`, `PLAN_PATH`, `PLAN_NOT_LINEAR`, `PLAN_DUPLICATE`, and
 *   those of a style
 */
export function resolvePlan(model: Module, plan: TensorParallelPlan): ParameterPlacements {
  const names = new Map([...model.namedParameters()].map(([name, parameter]) => [parameter, name]))
  const placements = new Map<string, ParameterPlacement>()
  const place = (parameter: Parameter, placement: ParameterPlacement, key: string) => {
    const name = names.get(parameter) as string
    if (placements.has(name)) throw duplicateKey(name, key)
    placements.set(name, placement)
  }
  for (const [key, style] of Object.entries(plan)) {
    for (const path of expandKey(model, key)) {
      const module = splittableAt(model, path, key)
      if (module instanceof Embedding) {
        place(module.weight, placeEmbedding(style, module, path), key)
        continue
      }
      const placed: LinearPlacement = placeLinear(style, module, path)
      place(module.weight, placed.weight, key)
      if (module.bias !== undefined) place(module.bias, placed.bias, key)
    }
  }
  return placements
}

function duplicateKey(name: string, key: string): RankwiseError {
  return new RankwiseError('PLAN_DUPLICATE', `the plan key '${key}' names a weight that another key has placed`, {
    where: name,
    rule: 'one plan key per module, also where a module is used in two places',
  })
}

/** The paths that a plan key stands for. */
function expandKey(model: Module, key: string): readonly string[] {
  const parts = key.split('*')
  if (parts.length > 2) {
    throw new RankwiseError('PLAN_WILDCARDS', `the plan key '${key}' has ${parts.length - 1} wildcards`, {
      where: key,
      rule: "a plan key has at most one '*'",
      remedy: 'write one key per outer index',
    })
  }
  const [before, after] = parts
  if (before === undefined || after === undefined) return [key]
  const container = before.replace(/\.$/, '')
  const list = submodule(model, container, key)
  if (!(list instanceof ModuleList)) {
    throw new RankwiseError('PLAN_WILDCARD_LIST', `'*' in '${key}' does not expand over a list`, {
      where: container || '(model)',
      actual: { module: list.constructor.name },
      rule: "what comes before '*' is a ModuleList",
    })
  }
  return Array.from({ length: list.length }, (_, i) => `${before}${i}${after}`)
}

function splittableAt(model: Module, path: string, key: string): Linear | Embedding {
  const module = submodule(model, path, key)
  if (module instanceof Linear || module instanceof Embedding) return module
  throw new RankwiseError('PLAN_NOT_LINEAR', `the plan key '${key}' names a ${module.constructor.name}`, {
    where: path,
    rule: 'a parallel style applies to a Linear or an Embedding',
  })
}

function submodule(model: Module, path: string, key: string): Module {
  try {
    return model.getSubmodule(path)
  } catch (error) {
    throw new RankwiseError('PLAN_PATH', `the plan key '${key}' names no module of a ${model.constructor.name}`, {
      where: path,
      rule: 'plan keys are module paths relative to the model',
      cause: error,
    })
  }
}

/**
 * The degrees that a plan and a head count allow, ascending: those that divide the heads and every
 * block. A model with neither has the degree 1.
 *
 * @param heads - number of attention heads; undefined for a model without any
 */
export function legalDegrees(placements: ParameterPlacements, heads: number | undefined): readonly number[] {
  const shards = [...placements.values()].flatMap(({ placement }) => (placement.kind === 'shard' ? [placement] : []))
  const sizes = shards.flatMap((placement) => (placement.heads === undefined ? placement.blocks : []))
  const divisor = [...sizes, ...(heads === undefined ? [] : [heads])].reduce(greatestCommonDivisor, 0)
  if (divisor === 0) return [1]
  return Array.from({ length: divisor }, (_, i) => i + 1).filter(
    (degree) => divisor % degree === 0 && shards.every((placement) => headsDivide(placement.heads ?? degree, degree)),
  )
}

function greatestCommonDivisor(a: number, b: number): number {
  return b === 0 ? a : greatestCommonDivisor(b, a % b)
}

/**
 * Refuses a degree before anything is read.
 *
 * @throws RankwiseError `TP_DEGREE_INVALID`, `HEADS_NOT_DIVISIBLE`, `BLOCK_NOT_DIVISIBLE`
 */
export function checkDegree(placements: ParameterPlacements, heads: number | undefined, tpDegree: number): void {
  if (!Number.isInteger(tpDegree) || tpDegree < 1) {
    throw new RankwiseError('TP_DEGREE_INVALID', `${textOf(tpDegree)} is not a tensor-parallel degree`, {
      rule: 'tpDegree is a positive integer',
    })
  }
  const degrees = legalDegrees(placements, heads)
  const remedy = `use a degree of ${degrees.join(', ')}`
  if (heads !== undefined && heads % tpDegree !== 0) {
    throw new RankwiseError('HEADS_NOT_DIVISIBLE', `${heads} attention heads cannot be split over ${tpDegree} ranks`, {
      where: 'numAttentionHeads',
      actual: { heads, tpDegree, legalDegrees: degrees },
      rule: 'the number of attention heads is divisible by the tensor-parallel degree',
      remedy,
    })
  }
  for (const [name, { placement }] of placements) {
    if (placement.kind !== 'shard') continue
    if (placement.heads !== undefined && !headsDivide(placement.heads, tpDegree)) {
      throw new RankwiseError('HEADS_NOT_DIVISIBLE', `${placement.heads} heads cannot be shared by ${tpDegree} ranks`, {
        where: name,
        actual: { heads: placement.heads, tpDegree, legalDegrees: degrees },
        rule: 'the number of key and value heads is divisible by the tensor-parallel degree, or divides it',
        remedy,
      })
    }
    const block = placement.blocks.find((size) => size % partsOf(placement, tpDegree) !== 0)
    if (block === undefined) continue
    throw new RankwiseError('BLOCK_NOT_DIVISIBLE', `a block of ${block} cannot be split over ${tpDegree} ranks`, {
      where: name,
      actual: { block, dim: placement.dim, blocks: placement.blocks, tpDegree, legalDegrees: degrees },
      rule: 'every block of a split weight is divisible by the tensor-parallel degree',
      remedy,
    })
  }
}

import { type Shape, sizeOf } from '@rankwise/core'
import type { Engine, Ref } from '../engine.ts'
import type { Operand, RuleContext, Rules } from './rule.ts'

function reshape({ engine, outputs: [result] }: RuleContext<object>, x: Operand) {
  return [engine.reshape(x.ref, result?.shape ?? [])]
}

type TransposeAttributes = { readonly permutation: readonly number[] }

function transpose({ engine, attributes }: RuleContext<TransposeAttributes>, x: Operand) {
  return [engine.transpose(x.ref, attributes.permutation)]
}

type SplitAttributes = { readonly dim: number; readonly sizes: readonly number[] }

function split({ engine, attributes: { dim, sizes } }: RuleContext<SplitAttributes>, x: Operand) {
  let end = 0
  return sizes.map((size) => {
    const start = end
    end += size
    return slice(engine, x, dim, start, end)
  })
}

/** Indices `start` to `end` along one dimension. */
function slice(engine: Engine, { ref, shape }: Operand, dim: number, start: number, end: number): Ref {
  if (start === end) return engine.write(ref.dtype, shape.with(dim, 0), new Float32Array())
  const begin = shape.map((_, i) => (i === dim ? start : 0))
  return engine.slice(ref, begin, shape.with(dim, end - start) as number[])
}

type ConcatAttributes = { readonly dim: number }

function concat({ engine, attributes: { dim } }: RuleContext<ConcatAttributes>, ...inputs: readonly Operand[]) {
  const withElements = inputs.filter(({ shape }) => sizeOf(shape as Shape) > 0)
  return [
    engine.concat(
      withElements.map(({ ref }) => ref),
      dim,
    ),
  ]
}

type ShardAttributes = { readonly dim: number; readonly starts: readonly number[]; readonly ends: readonly number[] }

/** The index ranges of one rank along `dim`, joined. */
function shard({ engine, attributes: { dim, starts, ends } }: RuleContext<ShardAttributes>, x: Operand) {
  const ranges = starts.map((start, i) => [start, ends[i] as number] as const).filter(([start, end]) => start < end)
  return [
    engine.concat(
      ranges.map(([start, end]) => slice(engine, x, dim, start, end)),
      dim,
    ),
  ]
}

export const movementRules: Rules = { reshape, transpose, split, concat, shard }

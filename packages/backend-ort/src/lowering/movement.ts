import { sizeOf } from '@rankwise/core'
import type { OnnxBuilder } from '../onnx/onnx-builder.ts'
import type { LoweringContext, LoweringRules, Operand } from './rule.ts'

function reshape({ onnx, outputs: [result] }: LoweringContext<object>, x: Operand): readonly string[] {
  return [onnx.reshape(x.name, result?.shape ?? [])]
}

function transpose(
  { onnx, attributes }: LoweringContext<{ readonly permutation: readonly number[] }>,
  x: Operand,
): readonly string[] {
  return [onnx.op('Transpose', [x.name], { perm: { ints: attributes.permutation } })]
}

type SplitAttributes = { readonly dim: number; readonly sizes: readonly number[] }

/** Pieces that nothing reads are not copied. */
function split({ onnx, attributes, outputs }: LoweringContext<SplitAttributes>, x: Operand): readonly string[] {
  const { dim, sizes } = attributes
  if (outputs.every(({ isUsed }) => isUsed)) {
    return onnx.ops('Split', [x.name, onnx.integers(sizes)], { axis: { i: dim } }, sizes.length)
  }
  const starts = sizes.map((_, i) => sizes.slice(0, i).reduce((sum, size) => sum + size, 0))
  return outputs.map(({ isUsed }, i) => {
    const start = starts[i] as number
    return isUsed ? slice(onnx, x, dim, start, start + (sizes[i] as number)) : ''
  })
}

function slice(onnx: OnnxBuilder, x: Operand, dim: number, start: number, end: number): string {
  return onnx.op('Slice', [x.name, onnx.integers([start]), onnx.integers([end]), onnx.integers([dim])])
}

function concat(
  { onnx, attributes }: LoweringContext<{ readonly dim: number }>,
  ...inputs: readonly Operand[]
): readonly string[] {
  const filled = inputs.filter(({ shape }) => sizeOf(shape) > 0)
  return [
    onnx.op(
      'Concat',
      filled.map(({ name }) => name),
      { axis: { i: attributes.dim } },
    ),
  ]
}

type ShardAttributes = { readonly dim: number; readonly starts: readonly number[]; readonly ends: readonly number[] }

/** The index ranges of one rank along `dim`, joined. */
function shard({ onnx, attributes }: LoweringContext<ShardAttributes>, x: Operand): readonly string[] {
  const { dim, starts, ends } = attributes
  const pieces = starts.map((start, i) => slice(onnx, x, dim, start, ends[i] as number))
  return pieces.length === 1 ? pieces : [onnx.op('Concat', pieces, { axis: { i: dim } })]
}

export const movementRules: LoweringRules = { reshape, transpose, split, concat, shard }

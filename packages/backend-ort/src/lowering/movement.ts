import { sizeOf } from '@rankwise/core'
import type { OnnxBuilder } from '../onnx/onnx-builder.ts'
import type { Lowered, LoweringContext, LoweringRules, Operand, Part, Parts } from './rule.ts'

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

/** Pieces that nothing reads are not copied, and neither is what is in parts already, where a piece has whole ones. */
function split({ onnx, attributes, outputs }: LoweringContext<SplitAttributes>, x: Operand): readonly Lowered[] {
  const { dim, sizes } = attributes
  const isInParts = x.parts.parts.length > 1 && x.parts.dim === dim
  if (!isInParts && outputs.every(({ isUsed }) => isUsed)) {
    return onnx.ops('Split', [x.name, onnx.integers(sizes)], { axis: { i: dim } }, sizes.length)
  }
  const starts = sizes.map((_, i) => sizes.slice(0, i).reduce((sum, size) => sum + size, 0))
  return outputs.map(({ isUsed }, i) => {
    const [start, size] = [starts[i], sizes[i]] as [number, number]
    if (!isUsed) return ''
    return isInParts && size > 0
      ? sliceParts(onnx, x.parts, start, start + size)
      : slice(onnx, x.name, dim, start, start + size)
  })
}

/** Elements `start` to `end` of a value in parts, in parts as well. */
function sliceParts(onnx: OnnxBuilder, { dim, parts }: Parts, start: number, end: number): Parts {
  const slices: Part[] = []
  let first = 0
  for (const { name, size } of parts) {
    const [from, to] = [Math.max(start - first, 0), Math.min(end - first, size)]
    if (to - from === size) slices.push({ name, size })
    else if (from < to) slices.push({ name: slice(onnx, name, dim, from, to), size: to - from })
    first += size
  }
  return { dim, parts: slices }
}

function slice(onnx: OnnxBuilder, x: string, dim: number, start: number, end: number): string {
  return onnx.op('Slice', [x, onnx.integers([start]), onnx.integers([end]), onnx.integers([dim])])
}

/** Joined where something needs it whole. */
function concat(
  { attributes: { dim } }: LoweringContext<{ readonly dim: number }>,
  ...inputs: readonly Operand[]
): readonly Parts[] {
  const filled = inputs.filter(({ shape }) => sizeOf(shape) > 0)
  return [{ dim, parts: filled.flatMap((input) => partsAlong(input, dim)) }]
}

function partsAlong(operand: Operand, dim: number): readonly Part[] {
  if (operand.parts.dim === dim) return operand.parts.parts
  return [{ name: operand.name, size: operand.shape[dim] as number }]
}

type ShardAttributes = { readonly dim: number; readonly starts: readonly number[]; readonly ends: readonly number[] }

/** The index ranges of one rank along `dim`, joined. */
function shard({ onnx, attributes }: LoweringContext<ShardAttributes>, x: Operand): readonly string[] {
  const { dim, starts, ends } = attributes
  const pieces = starts.map((start, i) => slice(onnx, x.name, dim, start, ends[i] as number))
  return pieces.length === 1 ? pieces : [onnx.op('Concat', pieces, { axis: { i: dim } })]
}

export const movementRules: LoweringRules = { reshape, transpose, split, concat, shard }

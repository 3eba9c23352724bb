import { normal, rotation, segmentOf } from '@rankwise/conformance'
import { type DType, type Segment, type ShardSource, type Tensor, trace } from '@rankwise/core'
import { blockInputs, Flux2SingleBlock } from '../flux2-single-block.ts'

const HEADS = { heads: 6, headDim: 64, mlp: 1152 }

/** A weight that is read from memory. */
export function sourceOf(tensor: Tensor): ShardSource {
  const { dtype, shape, byteLength } = tensor
  const place = { name: 'weight', file: 'memory', slices: undefined, ranges: () => undefined }
  return { ...place, dtype, shape, fullShape: shape, byteLength, read: async () => tensor }
}

/** A FLUX.2 single block of 384 channels as one segment, with inputs and weights. */
export function placedBlock(
  tokens: number,
  dtype: DType = 'bfloat16',
): {
  readonly segment: Segment
  readonly inputs: readonly Tensor[]
  readonly weights: readonly Tensor[]
} {
  const sizes = { ...HEADS, tokens }
  const block = new Flux2SingleBlock(sizes)
  const graph = trace('block', block, blockInputs(sizes), (inputs) => ({ out: block.call(inputs) }))
  const segment = segmentOf(graph)
  const tables = rotation(tokens, HEADS.headDim / 2)
  const inputs = segment.inputs.map(({ name = '', shape }, i) => {
    return name in tables ? (tables[name as keyof typeof tables] as Tensor) : normal(shape, i)
  })
  const weights = segment.parameters.map(({ shape }, i) => {
    const spread = shape.length === 1 ? { mean: 1, deviation: 0.1 } : { deviation: (shape[1] as number) ** -0.5 }
    return normal(shape, 10 + i, spread).cast(dtype)
  })
  return { segment, inputs, weights }
}

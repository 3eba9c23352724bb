import { Tensor } from '@rankwise/core'

/** Reference images as tokens of the transformer. */
export interface ReferenceTokens {
  /** Packed and normalised, float32 `[1, tokens, 4 * latentChannels]`; the same for every picture of a batch. */
  readonly latents: Tensor<'float32'>
  /** int32 `[tokens, 4]`: T is 10 + 10 i in image i, H and W count from 0 in each. */
  readonly ids: Tensor<'int32'>
}

/** Joins tokens `[batch, tokens, channels]` in order; those of batch 1 are repeated. */
export function joinTokens(parts: readonly Tensor<'float32'>[], batch: number): Tensor<'float32'> {
  const channels = parts[0]?.shape[2] as number
  const tokens = parts.reduce((sum, { shape }) => sum + (shape[1] as number), 0)
  const joined = Tensor.zeros('float32', [batch, tokens, channels])
  for (let row = 0; row < batch; row++) {
    let at = row * tokens * channels
    for (const { data, shape } of parts) {
      const size = (shape[1] as number) * channels
      const from = shape[0] === 1 ? 0 : row * size
      joined.data.set(data.subarray(from, from + size), at)
      at += size
    }
  }
  return joined
}

/** Joins position ids `[tokens, 4]` in order. */
export function joinIds(parts: readonly Tensor<'int32'>[]): Tensor<'int32'> {
  const tokens = parts.reduce((sum, { shape }) => sum + (shape[0] as number), 0)
  const joined = Tensor.zeros('int32', [tokens, 4])
  let at = 0
  for (const { data } of parts) {
    joined.data.set(data, at)
    at += data.length
  }
  return joined
}

/** The first tokens of `[batch, tokens, channels]`. */
export function firstTokens({ data, shape }: Tensor<'float32'>, count: number): Tensor<'float32'> {
  const [batch = 0, tokens = 0, channels = 0] = shape
  const first = Tensor.zeros('float32', [batch, count, channels])
  for (let row = 0; row < batch; row++) {
    const from = row * tokens * channels
    first.data.set(data.subarray(from, from + count * channels), row * count * channels)
  }
  return first
}

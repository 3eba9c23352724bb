import { Tensor } from '@rankwise/core'
import type { LatentDType } from '@rankwise/diffusion'
import { gather, type LatentTensor } from './latent-tensor.ts'

/** Reference images as tokens of the transformer. */
export interface ReferenceTokens {
  /** Packed and normalised `[1, tokens, 4 * latentChannels]`; the same for every picture of a batch. */
  readonly latents: LatentTensor
  /** int32 `[tokens, 4]`: T is 10 + 10 i in image i, H and W count from 0 in each. */
  readonly ids: Tensor<'int32'>
}

/** Joins tokens `[batch, tokens, channels]` in order, cast to one dtype; those of batch 1 are repeated. */
export function joinTokens(parts: readonly LatentTensor[], batch: number, dtype: LatentDType): LatentTensor {
  const channels = parts[0]?.shape[2] as number
  const tokens = parts.reduce((sum, { shape }) => sum + (shape[1] as number), 0)
  const cast = parts.map((part): LatentTensor => part.cast(dtype))
  const pieces = Array.from({ length: batch }, (_, row) =>
    cast.map((part) => {
      const size = (part.shape[1] as number) * channels
      return [part, part.shape[0] === 1 ? 0 : row * size, size] as const
    }),
  )
  return gather(dtype, [batch, tokens, channels], pieces.flat())
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
export function firstTokens(tensor: LatentTensor, count: number): LatentTensor {
  const [batch = 0, tokens = 0, channels = 0] = tensor.shape
  const rows = Array.from({ length: batch }, (_, row) => [tensor, row * tokens * channels, count * channels] as const)
  return gather(tensor.dtype, [batch, count, channels], rows)
}

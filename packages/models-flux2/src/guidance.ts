import { Tensor } from '@rankwise/core'
import { roundingOf } from '@rankwise/diffusion'
import type { LatentTensor } from './latent-tensor.ts'

/**
 * Classifier-free guidance (arXiv:2207.12598): `negative + scale * (positive - negative)`, every operation rounded to
 * the dtype of both as torch rounds it. torch takes the scale itself in float32 whatever that dtype is.
 */
export function guide(positive: LatentTensor, negative: LatentTensor, scale: number): LatentTensor {
  const round = roundingOf(positive.dtype)
  const factor = Math.fround(scale)
  const bases = negative.cast('float32').data
  const data = positive.cast('float32').data.map((value, i) => {
    const base = bases[i] as number
    return base + round(factor * round(value - base))
  })
  return Tensor.float32(positive.shape, data).cast(positive.dtype)
}

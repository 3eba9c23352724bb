import { Tensor } from '@rankwise/core'

/**
 * Classifier-free guidance (arXiv:2207.12598): `negative + scale * (positive - negative)`, every operation rounded to
 * float32 as torch rounds it.
 */
export function guide(positive: Tensor<'float32'>, negative: Tensor<'float32'>, scale: number): Tensor<'float32'> {
  const factor = Math.fround(scale)
  const data = positive.data.map((value, i) => {
    const base = negative.data[i] as number
    return base + Math.fround(factor * Math.fround(value - base))
  })
  return Tensor.float32(positive.shape, data)
}

import { bfloat16ToFloat32, float16ToFloat32, float32ToBfloat16, float32ToFloat16, RankwiseError } from '@rankwise/core'

/** dtypes in which latents, model outputs and images come. */
export type LatentDType = 'float32' | 'bfloat16' | 'float16'

const ROUNDINGS: Readonly<Record<LatentDType, (value: number) => number>> = {
  float32: Math.fround,
  bfloat16: (value) => bfloat16ToFloat32(float32ToBfloat16(value)),
  float16: (value) => float16ToFloat32(float32ToFloat16(value)),
}

/**
 * The rounding that torch applies after every elementwise operation on a tensor of `dtype`: to the nearest value of the
 * dtype, ties to even. 16-bit floats are computed in float32 and rounded from there.
 *
 * @throws RankwiseError `DTYPE_UNSUPPORTED` when `dtype` is none of the three
 */
export function roundingOf(dtype: LatentDType): (value: number) => number {
  const rounding = ROUNDINGS[dtype]
  if (rounding === undefined) {
    throw new RankwiseError('DTYPE_UNSUPPORTED', 'not a dtype of latents or images', {
      actual: { dtype },
      rule: `dtype is one of ${Object.keys(ROUNDINGS).join(', ')}`,
    })
  }
  return rounding
}

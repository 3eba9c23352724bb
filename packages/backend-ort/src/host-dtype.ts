import { type DType, RankwiseError } from '@rankwise/core'

/**
 * Dtypes to compute in. ORT has few 16-bit float kernels on the CPU, so what is bfloat16 between graphs is float32 within
 * one, rounded to bfloat16 after every operation.
 */
export type ComputeDType = 'float32' | 'bfloat16'

/** Dtypes of values: those to compute in, and int32 for ids. */
export type HostDType = ComputeDType | 'int32'

/** The dtype, if values may have it. @throws RankwiseError `DTYPE_UNSUPPORTED` naming `where` */
export function hostDType(dtype: DType, where: string): HostDType {
  return dtype === 'int32' ? dtype : computeDType(dtype, where)
}

/** The dtype, if a weight may be computed in it. @throws RankwiseError `DTYPE_UNSUPPORTED` naming `where` */
export function computeDType(dtype: DType, where: string): ComputeDType {
  if (dtype === 'float32' || dtype === 'bfloat16') return dtype
  throw new RankwiseError('DTYPE_UNSUPPORTED', `the ort backend does not compute in ${dtype}`, {
    where,
    actual: { dtype },
    rule: 'values are float32 or bfloat16, ids are int32; weights stored in another dtype are cast',
  })
}

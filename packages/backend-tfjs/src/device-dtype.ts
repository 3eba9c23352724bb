import { type DType, RankwiseError } from '@rankwise/core'

/** Dtypes of values: float32 to compute with, int32 for ids. */
export type ValueDType = 'float32' | 'int32'

/** The dtype, if values may have it. @throws RankwiseError `DTYPE_UNSUPPORTED` naming `where` */
export function valueDType(dtype: DType, where: string): ValueDType {
  if (dtype === 'float32' || dtype === 'int32') return dtype
  throw unsupported(dtype, where)
}

/** Fails unless a weight may be computed in the dtype. @throws RankwiseError `DTYPE_UNSUPPORTED` naming `where` */
export function requireFloat32(dtype: DType, where: string): void {
  if (dtype !== 'float32') throw unsupported(dtype, where)
}

function unsupported(dtype: DType, where: string): RankwiseError {
  return new RankwiseError('DTYPE_UNSUPPORTED', `the backend tfjs does not compute in ${dtype}`, {
    where,
    actual: { dtype },
    rule: 'values are float32, ids are int32; weights stored in another dtype are cast',
  })
}

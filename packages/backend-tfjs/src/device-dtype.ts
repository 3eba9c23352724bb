import { type DType, RankwiseError } from '@rankwise/core'

/** Dtypes to compute in. What is bfloat16 is float32 in an engine, rounded to bfloat16 after every operation. */
export type ComputeDType = 'float32' | 'bfloat16'

/** Dtypes of values: those to compute in, and int32 for ids. */
export type ValueDType = ComputeDType | 'int32'

/** The dtypes that an engine computes in. */
export interface DTypes {
  readonly dtypes: readonly ComputeDType[]
}

/** The dtype, if values may have it. @throws RankwiseError `DTYPE_UNSUPPORTED` naming `where` */
export function valueDType(dtype: DType, where: string, engine: DTypes): ValueDType {
  return dtype === 'int32' ? dtype : computeDType(dtype, where, engine)
}

/** The dtype, if a weight may be computed in it. @throws RankwiseError `DTYPE_UNSUPPORTED` naming `where` */
export function computeDType(dtype: DType, where: string, { dtypes }: DTypes): ComputeDType {
  const computed = dtypes.find((known) => known === dtype)
  if (computed !== undefined) return computed
  throw new RankwiseError('DTYPE_UNSUPPORTED', `the backend tfjs does not compute in ${dtype}`, {
    where,
    actual: { dtype, supported: dtypes },
    rule: 'values are in a dtype that the engine computes in, ids are int32; weights stored in another dtype are cast',
  })
}

/** The dtype of a value's elements in an engine. */
export function elementDType(dtype: DType): 'float32' | 'int32' {
  return dtype === 'int32' ? dtype : 'float32'
}

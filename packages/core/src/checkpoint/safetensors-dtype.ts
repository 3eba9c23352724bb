import type { DType } from '../dtype.ts'

/** Dtypes the format has and Rankwise cannot hold in memory, by the format's own names. */
export type UnsupportedDType =
  | 'U64'
  | 'C64'
  | 'U32'
  | 'U16'
  | 'F8_E5M2FNUZ'
  | 'F8_E4M3FNUZ'
  | 'F8_E8M0'
  | 'F8_E4M3'
  | 'F8_E5M2'
  | 'F6_E3M2'
  | 'F6_E2M3'
  | 'F4'

/** How a file stores a tensor: torch's name, or the format's own where Rankwise cannot read it. */
export type StoredDType = DType | UnsupportedDType

export interface SafetensorsDType {
  readonly dtype: StoredDType
  readonly bits: number
}

/**
 * Every dtype of safetensors 0.8 by its name in the header, in the order in which its writer lays tensors out
 * (`Dtype` of safetensors/src/tensor.rs, descending).
 */
export const SAFETENSORS_DTYPES: ReadonlyMap<string, SafetensorsDType> = new Map<string, SafetensorsDType>([
  ['U64', { dtype: 'U64', bits: 64 }],
  ['I64', { dtype: 'int64', bits: 64 }],
  ['F64', { dtype: 'float64', bits: 64 }],
  ['C64', { dtype: 'C64', bits: 64 }],
  ['F32', { dtype: 'float32', bits: 32 }],
  ['U32', { dtype: 'U32', bits: 32 }],
  ['I32', { dtype: 'int32', bits: 32 }],
  ['BF16', { dtype: 'bfloat16', bits: 16 }],
  ['F16', { dtype: 'float16', bits: 16 }],
  ['U16', { dtype: 'U16', bits: 16 }],
  ['I16', { dtype: 'int16', bits: 16 }],
  ['F8_E5M2FNUZ', { dtype: 'F8_E5M2FNUZ', bits: 8 }],
  ['F8_E4M3FNUZ', { dtype: 'F8_E4M3FNUZ', bits: 8 }],
  ['F8_E8M0', { dtype: 'F8_E8M0', bits: 8 }],
  ['F8_E4M3', { dtype: 'F8_E4M3', bits: 8 }],
  ['F8_E5M2', { dtype: 'F8_E5M2', bits: 8 }],
  ['I8', { dtype: 'int8', bits: 8 }],
  ['U8', { dtype: 'uint8', bits: 8 }],
  ['F6_E3M2', { dtype: 'F6_E3M2', bits: 6 }],
  ['F6_E2M3', { dtype: 'F6_E2M3', bits: 6 }],
  ['F4', { dtype: 'F4', bits: 4 }],
  ['BOOL', { dtype: 'bool', bits: 8 }],
])

const UNSUPPORTED: ReadonlySet<StoredDType> = new Set(
  [...SAFETENSORS_DTYPES].filter(([name, { dtype }]) => name === dtype).map(([, { dtype }]) => dtype),
)

/** Whether tensors of this dtype can be read. */
export function isSupported(dtype: StoredDType): dtype is DType {
  return !UNSUPPORTED.has(dtype)
}

import type { DType, ReduceOp } from '@rankwise/core'

/** `ncclDataType_t` of the dtypes that NCCL can reduce; it has no 16-bit integers and no booleans. */
const DATA_TYPES: Partial<Record<DType, number>> = {
  int8: 0,
  uint8: 1,
  int32: 2,
  int64: 4,
  float16: 6,
  float32: 7,
  float64: 8,
  bfloat16: 9,
}

export const REDUCIBLE_DTYPES = Object.keys(DATA_TYPES) as readonly DType[]

/** `ncclUint8`: what only moves, moves as bytes, so that tensors of every dtype can. */
export const BYTE_TYPE = 1

/** `ncclInt32` */
export const WORD_TYPE = 2

/** `ncclRedOp_t` */
const REDUCTIONS: Record<ReduceOp, number> = { sum: 0, max: 2, min: 3 }

/** The dtype as NCCL numbers it; the operation was checked before. */
export function dataType(dtype: DType): number {
  return DATA_TYPES[dtype] as number
}

/** The reduction as NCCL numbers it. */
export function reduction(op: ReduceOp): number {
  return REDUCTIONS[op]
}

/** `ncclResult_t`, as far as it matters which it is. */
export const NCCL_SUCCESS = 0
export const NCCL_REMOTE_ERROR = 6
export const NCCL_IN_PROGRESS = 7

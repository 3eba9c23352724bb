import { type DType, type DTypeArrays, itemSize, type ReduceOp, type TensorData, viewAs } from '@rankwise/core'
import type { Reduce } from './kernel.ts'

/** Reduces memory that holds elements of a dtype, and is aligned to them. */
export function reduceBytes(
  reduce: Reduce,
  dtype: DType,
  op: ReduceOp,
  sources: readonly Uint8Array[],
  target: Uint8Array,
): void {
  reduce(
    dtype,
    op,
    sources.map((source) => viewOf(dtype, source)),
    viewOf(dtype, target),
  )
}

/** The memory of elements. */
export function bytesOf({ buffer, byteOffset, byteLength }: TensorData): Uint8Array {
  return new Uint8Array(buffer, byteOffset, byteLength)
}

/** As `viewAs`, of bytes that are known to be aligned. */
function viewOf(dtype: DType, bytes: Uint8Array): DTypeArrays[DType] {
  const view = viewAs(dtype, bytes)
  if (view.buffer !== bytes.buffer) throw new RangeError(`${itemSize(dtype)}-byte elements at ${bytes.byteOffset}`)
  return view
}

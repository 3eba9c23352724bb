import { type DType, itemSize, RankwiseError, type Shape, sizeOf } from '@rankwise/core'
import type { TensorLayout } from '@rankwise/core/collectives'

/** A contiguous tensor in the memory of this rank's GPU; whoever allocated it keeps it until the operation is over. */
export interface DeviceBuffer {
  /** Address on the device, as torch's `data_ptr()`. */
  readonly dataPtr: bigint
  readonly dtype: DType
  readonly shape: Shape
}

/** What an operation tells of a buffer. */
export function contentsOf({ dtype, shape }: DeviceBuffer): TensorLayout {
  return { dtype, shape, byteLength: sizeOf(shape) * itemSize(dtype) }
}

/**
 * Refuses an output that the result would not fit exactly.
 *
 * @param rows what dim 0 of the result is, in rows of the input
 * @throws RankwiseError `COLLECTIVE_SHAPE`
 */
export function requireOutput(where: string, input: DeviceBuffer, output: DeviceBuffer, rows: number): void {
  const expected = [rows, ...input.shape.slice(1)]
  const fits = output.shape.length === expected.length && output.shape.every((size, i) => size === expected[i])
  if (fits && output.dtype === input.dtype) return
  throw new RankwiseError('COLLECTIVE_SHAPE', 'the output does not fit the result', {
    where,
    actual: { shape: output.shape, dtype: output.dtype, input: input.shape, inputDtype: input.dtype },
    rule: `the output has dtype ${input.dtype} and shape [${expected.join(', ')}]`,
  })
}

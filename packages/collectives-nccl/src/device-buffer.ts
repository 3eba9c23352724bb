import { type DeviceBuffer, itemSize, RankwiseError, sizeOf } from '@rankwise/core'
import type { TensorLayout } from '@rankwise/core/collectives'

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

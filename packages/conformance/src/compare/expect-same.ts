import { type DType, sizeOf, type Tensor } from '@rankwise/core'
import { expectClose } from './expect-close.ts'
import { type ToleranceRow, toleranceOf } from './tolerance-table.ts'

/** What results are of. */
export interface Computed {
  readonly row: ToleranceRow
  readonly dtype: DType
}

/**
 * Fails unless results have the dtype and the shapes that they should have, and values within the table of tolerances.
 *
 * @throws Error naming the result and the worst index in it
 */
export function expectSame(actual: readonly Tensor[], expected: readonly Tensor[], { row, dtype }: Computed): void {
  if (actual.length !== expected.length) throw new Error(`${actual.length} results instead of ${expected.length}`)
  for (const [i, whole] of expected.entries()) {
    const result = actual[i] as Tensor
    const place = expected.length > 1 ? `result ${i}: ` : ''
    const [type, expectedType] = [typeOf(result.dtype, result), typeOf(dtype, whole)]
    if (type !== expectedType) throw new Error(`${place}is ${type} instead of ${expectedType}`)
    if (sizeOf(whole.shape) === 0) continue
    try {
      expectClose(result, whole, toleranceOf(row, dtype, whole))
    } catch (error) {
      throw new Error(`${place}${(error as Error).message}`, { cause: error })
    }
  }
}

function typeOf(dtype: DType, { shape }: Pick<Tensor, 'shape'>): string {
  return `${dtype}[${shape.join(', ')}]`
}

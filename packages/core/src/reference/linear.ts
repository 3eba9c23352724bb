import { RankwiseError } from '../errors.ts'
import { Tensor } from '../tensor.ts'
import type { Float64Tensor } from './kernel.ts'

/** `x @ weight.T`; x `[.., in]`, weight `[out, in]`. */
export function linear(_attributes: object, x: Float64Tensor, weight: Float64Tensor): readonly Float64Tensor[] {
  const [out, features] = weight.shape as readonly [number, number]
  const result = Tensor.zeros('float64', [...x.shape.slice(0, -1), out])
  const rows = result.data.length / Math.max(out, 1)
  // Both operands are read along their rows, so no tiling is needed for the inner loop to be sequential.
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < out; column++) {
      result.data[row * out + column] = dot(x.data, row * features, weight.data, column * features, features)
    }
  }
  return [result]
}

/** Sum of the products of `length` elements from two offsets on. */
export function dot(a: Float64Array, startA: number, b: Float64Array, startB: number, length: number): number {
  let sum = 0
  for (let i = 0; i < length; i++) sum += (a[startA + i] as number) * (b[startB + i] as number)
  return sum
}

/**
 * Rows of `table [entries, width]` by ids, with zeros around each.
 *
 * @throws RankwiseError `EMBEDDING_ID` when an id is not an entry of the table
 */
export function embedding(
  { before = 0, after = 0 }: { readonly before?: number; readonly after?: number },
  ids: Float64Tensor,
  table: Float64Tensor,
): readonly Float64Tensor[] {
  const [entries, width] = table.shape as readonly [number, number]
  const padded = before + width + after
  const result = Tensor.zeros('float64', [...ids.shape, padded])
  for (const [i, id] of ids.data.entries()) {
    if (id < 0 || id >= entries) {
      throw new RankwiseError('EMBEDDING_ID', `the id ${id} is outside of the table`, {
        actual: { id, position: i, entries },
        rule: 'ids are at least 0 and less than the number of entries',
      })
    }
    result.data.set(table.data.subarray(id * width, (id + 1) * width), i * padded + before)
  }
  return [result]
}

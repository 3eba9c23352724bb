import { type Placement, shardSlices } from '../placement.ts'
import type { Tensor } from '../tensor.ts'
import type { Float64Tensor } from './kernel.ts'
import { join, sliceAlong } from './movement.ts'

/**
 * The part of a whole tensor that `rank` holds under a placement, in float64.
 *
 * @throws RankwiseError `BLOCK_NOT_DIVISIBLE`
 */
export function shardTensor(tensor: Tensor, placement: Placement, rank: number, tpDegree: number): Float64Tensor {
  const whole = tensor.cast('float64')
  const slices = shardSlices(placement, rank, tpDegree)
  if (slices === undefined) return whole
  const pieces = slices.ranges.map(([start, end]) => sliceAlong(whole, slices.dim, start, end))
  return join(pieces, slices.dim)
}

import { shardLayout } from './checkpoint/shard-layout.ts'
import { allocate, itemSize } from './dtype.ts'
import type { ShardSlices } from './placement.ts'
import { sizeOf, Tensor } from './tensor.ts'

/**
 * The part of a tensor that `slices` name, in memory of its own; all of it without them.
 *
 * @throws RankwiseError `SHARD_SLICES` when they do not fit the shape
 */
export function sliceTensor(tensor: Tensor, slices: ShardSlices | undefined): Tensor {
  const { dtype, shape, data } = tensor
  const { shape: localShape, rowCount, rowBytes, runs } = shardLayout(shape, itemSize(dtype), slices, 'tensor')
  const part = allocate(dtype, sizeOf(localShape))
  const source = new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
  const target = new Uint8Array(part.buffer, part.byteOffset, part.byteLength)
  let position = 0
  for (let row = 0; row < rowCount; row++) {
    for (const { offset, length } of runs) {
      const start = row * rowBytes + offset
      target.set(source.subarray(start, start + length), position)
      position += length
    }
  }
  return new Tensor(dtype, localShape, part)
}

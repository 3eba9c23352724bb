import { RankwiseError } from '../errors.ts'
import type { ShardSlices } from '../placement.ts'
import { type Shape, sizeOf } from '../tensor.ts'

/** Consecutive bytes. */
export interface ByteRange {
  readonly offset: number
  readonly length: number
}

/**
 * Where the bytes of a shard lie within its tensor: `rowCount` rows of `rowBytes`, and in each row the same `runs`, in
 * ascending order with gaps between them. A shard along dim 0 has one row, the whole tensor.
 */
export interface ShardLayout {
  /** Of the shard. */
  readonly shape: Shape
  readonly byteLength: number
  readonly rowCount: number
  readonly rowBytes: number
  /** Offsets from the start of a row. */
  readonly runs: readonly ByteRange[]
}

/** Bytes of a tensor that are consecutive in the file and in the shard. */
export interface ShardRun extends ByteRange {
  /** Where they go, from the start of the shard. */
  readonly target: number
}

/**
 * Lays out the part of a tensor that `slices` name; all of it without them.
 *
 * @param shape Of the whole tensor.
 * @param itemBytes Bytes of an element.
 * @param where The tensor, for messages.
 * @throws RankwiseError `SHARD_SLICES` when `slices` do not fit the shape
 */
export function shardLayout(
  shape: Shape,
  itemBytes: number,
  slices: ShardSlices | undefined,
  where: string,
): ShardLayout {
  if (slices === undefined) return wholeLayout(shape, itemBytes)
  checkSlices(shape, slices, where)
  const { dim, ranges } = slices
  const size = shape[dim] as number
  const localSize = ranges.reduce((sum, [start, end]) => sum + end - start, 0)
  if (localSize === size) return wholeLayout(shape, itemBytes)

  const indexBytes = sizeOf(shape.slice(dim + 1)) * itemBytes
  const localShape = shape.with(dim, localSize)
  const runs = joinAdjacent(ranges).map(([start, end]) => ({
    offset: start * indexBytes,
    length: (end - start) * indexBytes,
  }))
  return {
    shape: localShape,
    byteLength: sizeOf(localShape) * itemBytes,
    rowCount: sizeOf(shape.slice(0, dim)),
    rowBytes: size * indexBytes,
    runs,
  }
}

/** The bytes of a shard within its tensor, where it is a few long ranges; `undefined` where every row has its own. */
export function contiguousRanges({ rowCount, byteLength, runs }: ShardLayout): readonly ByteRange[] | undefined {
  if (byteLength === 0) return []
  return rowCount === 1 ? runs : undefined
}

/** All runs of a shard, in the order of the file: of every row, where it is strided. */
export function* shardRuns({ rowCount, rowBytes, runs, byteLength }: ShardLayout): Generator<ShardRun> {
  if (byteLength === 0) return
  let target = 0
  for (let row = 0; row < rowCount; row++) {
    for (const { offset, length } of runs) {
      yield { offset: row * rowBytes + offset, length, target }
      target += length
    }
  }
}

function wholeLayout(shape: Shape, itemBytes: number): ShardLayout {
  const byteLength = sizeOf(shape) * itemBytes
  return { shape, byteLength, rowCount: 1, rowBytes: byteLength, runs: [{ offset: 0, length: byteLength }] }
}

function joinAdjacent(ranges: ShardSlices['ranges']): readonly (readonly [start: number, end: number])[] {
  const joined: [number, number][] = []
  for (const [start, end] of ranges) {
    const last = joined.at(-1)
    if (last !== undefined && last[1] === start) last[1] = end
    else if (start < end) joined.push([start, end])
  }
  return joined
}

function checkSlices(shape: Shape, { dim, ranges }: ShardSlices, where: string): void {
  const size = Number.isInteger(dim) && dim >= 0 ? shape[dim] : undefined
  if (size === undefined) {
    throw new RankwiseError('SHARD_SLICES', 'the tensor has no such dimension', { where, actual: { dim, shape } })
  }
  let previousEnd = 0
  for (const [start, end] of ranges) {
    if (!Number.isInteger(start) || !Number.isInteger(end) || start < previousEnd || end < start || end > size) {
      throw new RankwiseError('SHARD_SLICES', 'the ranges do not fit the tensor', {
        where,
        actual: { dim, size, range: [start, end], previousEnd },
        rule: 'ranges are ascending, do not overlap, and lie within the dimension',
      })
    }
    previousEnd = end
  }
}

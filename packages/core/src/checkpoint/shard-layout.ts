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

/** One call to the file: the bytes from `offset` of the tensor that hold the `runs` of a shard. */
export interface PlannedRead extends ByteRange {
  /** Where the first run goes, from the start of the shard; the others follow it without gaps. */
  readonly target: number
  /** Offsets from the start of the read. One alone fills the whole read. */
  readonly runs: readonly ByteRange[]
}

/**
 * Bytes between two runs up to which it is cheaper to read them than to make another call: a call costs 15 us, in
 * which the page cache gives 100 KiB.
 */
const MAX_GAP_BYTES = 128 * 1024

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

/**
 * Plans the reads of a shard, in the order of the file. Runs of a strided shard that lie close together share one
 * read of at most `windowBytes`; a run that is alone in its read can go straight to its target.
 */
export function* planReads(layout: ShardLayout, windowBytes: number): Generator<PlannedRead> {
  const contiguous = contiguousRanges(layout)
  const groups = contiguous === undefined ? groupRuns(allRuns(layout), windowBytes) : contiguous.map((run) => [run])
  let target = 0
  for (const group of groups) {
    yield readOf(group, target)
    for (const { length } of group) target += length
  }
}

function* groupRuns(runs: Iterable<ByteRange>, windowBytes: number): Generator<readonly ByteRange[]> {
  let group: ByteRange[] = []
  let [begin, end] = [0, 0]
  for (const run of runs) {
    const runEnd = run.offset + run.length
    if (group.length > 0 && (run.offset - end > MAX_GAP_BYTES || runEnd - begin > windowBytes)) {
      yield group
      group = []
    }
    if (group.length === 0) begin = run.offset
    group.push(run)
    end = runEnd
  }
  if (group.length > 0) yield group
}

function wholeLayout(shape: Shape, itemBytes: number): ShardLayout {
  const byteLength = sizeOf(shape) * itemBytes
  return { shape, byteLength, rowCount: 1, rowBytes: byteLength, runs: [{ offset: 0, length: byteLength }] }
}

function* allRuns({ rowCount, rowBytes, runs }: ShardLayout): Generator<ByteRange> {
  for (let row = 0; row < rowCount; row++) {
    for (const { offset, length } of runs) yield { offset: row * rowBytes + offset, length }
  }
}

function readOf(group: readonly ByteRange[], target: number): PlannedRead {
  const [first, last] = [group[0], group.at(-1)] as [ByteRange, ByteRange]
  return {
    offset: first.offset,
    length: last.offset + last.length - first.offset,
    target,
    runs: group.map(({ offset, length }) => ({ offset: offset - first.offset, length })),
  }
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

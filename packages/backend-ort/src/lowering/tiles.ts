import { type Shape, sizeOf } from '@rankwise/core'
import { rowsOf, type WeightStorage } from '../weight-storage.ts'

/** Rows `start` to `end` (exclusive) of a weight. */
export interface Rows {
  readonly start: number
  readonly end: number
}

/** Rows of a weight that one product reads: what lies in one piece, or the ends of several that are joined for it. */
export type Tile = readonly Rows[]

/**
 * Most bytes that one cast gives, unless {@link MIN_ROWS} are more: few enough to be multiplied while they are in the
 * CPU's caches. For a FLUX.2-klein-4B single block (27648x3072 and 3072x12288 in bfloat16, 1 thread) the CPU time of 768
 * tokens is 1.63 s, and 0.13 s of 16; with 40 MiB 1.77 and 0.20; with weights that are float32 already 1.69 and 0.09.
 * The memory of the run peaks at 183 MB, 215 and 222; it is 802 where whole weights are cast.
 */
const MAX_CAST_BYTES = 4 * 1024 * 1024

/**
 * Fewest rows that a product of its own is worth. ORT's GEMM adds up in another order where a thread has 64 columns or
 * fewer, so this is also why the bits of a result do not depend on how its weight is cut, at least on 1 and 2 threads.
 */
const MIN_ROWS = 256

/** ORT's kernels take columns in groups of 16. */
const ROW_GROUP = 16

/**
 * Cuts a weight into what is cast and multiplied at a time, along the pieces it is stored in where these are long
 * enough. A weight in float32 needs no cast: it is cut only where its pieces end.
 *
 * @param shape - with at least one element
 * @param castBytes - most that one cast gives, unless {@link MIN_ROWS} are more
 */
export function tilesOf(
  shape: Shape,
  { dtype, pieces }: WeightStorage,
  castBytes: number = MAX_CAST_BYTES,
): readonly Tile[] {
  const castRows = Math.max(MIN_ROWS, Math.floor(castBytes / (4 * sizeOf(shape.slice(1)))))
  const most = dtype === 'float32' ? rowsOf(shape) : castRows
  return groupsOf(pieces)
    .flatMap((group) => cutEvenly(group, most))
    .map((rows) => withinPieces(rows, pieces))
}

/** Runs of consecutive pieces that have {@link MIN_ROWS} rows together, in whole {@link ROW_GROUP}s. */
function groupsOf(pieces: readonly number[]): readonly Rows[] {
  const groups: Rows[] = []
  let [start, end] = [0, 0]
  for (const rows of pieces) {
    end += rows
    if (end - start < MIN_ROWS || end % ROW_GROUP !== 0) continue
    groups.push({ start, end })
    start = end
  }
  if (start === end) return groups
  // What is left over goes with the group before it unless it is long enough itself.
  const previous = end - start < MIN_ROWS ? groups.pop() : undefined
  return [...groups, { start: previous?.start ?? start, end }]
}

/** As few parts of at most `most` rows as possible, of the same size but for whole {@link ROW_GROUP}s. */
export function cutEvenly({ start, end }: Rows, most: number): readonly Rows[] {
  const count = Math.ceil((end - start) / most)
  const bound = (i: number) => {
    if (i === count) return end
    return start + Math.round(((end - start) * i) / count / ROW_GROUP) * ROW_GROUP
  }
  return Array.from({ length: count }, (_, i) => ({ start: bound(i), end: bound(i + 1) }))
}

/** The parts of `rows` in each piece that they touch. */
function withinPieces(rows: Rows, pieces: readonly number[]): Tile {
  const parts: Rows[] = []
  let first = 0
  for (const count of pieces) {
    const [start, end] = [Math.max(rows.start, first), Math.min(rows.end, first + count)]
    if (start < end) parts.push({ start, end })
    first += count
  }
  return parts
}

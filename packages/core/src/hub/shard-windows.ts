import { type ByteRange, type ShardLayout, shardRuns } from '../checkpoint/shard-layout.ts'

/**
 * Bytes between two runs of a shard up to which they are fetched rather than skipped: with four requests at a time, a
 * round trip of 40 ms costs what 1 MiB does at 100 MB/s.
 */
const MAX_GAP_BYTES = 1024 * 1024

/**
 * The windows of a tensor that hold the runs of a shard, in order: one per run of a contiguous shard, while the rows of
 * a strided one are read whole wherever less than 1 MiB lies between their runs. Offsets from the start of the tensor.
 */
export function shardWindows(layout: ShardLayout): readonly ByteRange[] {
  const windows: { readonly offset: number; length: number }[] = []
  for (const { offset, length } of shardRuns(layout)) {
    const last = windows.at(-1)
    const isClose = last !== undefined && layout.rowCount > 1 && offset - last.offset - last.length <= MAX_GAP_BYTES
    if (isClose) last.length = offset + length - last.offset
    else windows.push({ offset, length })
  }
  return windows
}

/**
 * Copies what belongs to a shard out of bytes of its tensor.
 *
 * @param target The shard.
 * @param bytes Of the tensor, from `offset` on.
 */
export function scatter(layout: ShardLayout, target: Uint8Array, bytes: Uint8Array, offset: number): void {
  const { rowBytes, rowCount, runs } = layout
  const end = offset + bytes.length
  const localRowBytes = layout.byteLength / rowCount
  for (let row = Math.floor(offset / rowBytes); row < rowCount && row * rowBytes < end; row++) {
    let position = row * localRowBytes
    for (const run of runs) {
      const start = row * rowBytes + run.offset
      const from = Math.max(start, offset)
      const to = Math.min(start + run.length, end)
      if (from < to) target.set(bytes.subarray(from - offset, to - offset), position + from - start)
      position += run.length
    }
  }
}

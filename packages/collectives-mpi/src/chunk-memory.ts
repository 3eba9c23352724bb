import { OPERATION_WORDS } from '@rankwise/core/collectives'
import { Chunk, WHOLE_BYTES } from './leaders.ts'
import type { Machines } from './machines.ts'
import type { Region } from './mailbox.ts'

/** Bytes that go from stage to stage together. MPI libraries are known to fail with messages that are much larger. */
export const CHUNK_BYTES = 4 * 2 ** 20
export const CACHE_LINE = 64
export const HEADER_BYTES = OPERATION_WORDS * 4

const PAGE = 4096

/** What a rank needs to take part: two chunks, which take turns, and the headers of an operation. */
export interface ChunkMemory {
  readonly chunkBytes: number
  readonly chunks: readonly [Chunk, Chunk]
  readonly headers: Region
}

/** @param region takes so many bytes of the memory that is shared with MPI, where there is one */
export function chunkMemory(
  machines: Machines,
  chunkBytes: number,
  region: (bytes: number) => Region = ordinary,
): ChunkMemory {
  const [data, contributions] = chunkSizes(machines, chunkBytes)
  return {
    chunkBytes,
    chunks: [new Chunk(region(data), region(contributions), 0), new Chunk(region(data), region(contributions), 1)],
    headers: region(machines.worldSize * HEADER_BYTES),
  }
}

/** Bytes that {@link chunkMemory} takes, in whole pages. Those that are never written take no memory. */
export function chunkMemoryBytes(machines: Machines, chunkBytes: number): number {
  const [data, contributions] = chunkSizes(machines, chunkBytes)
  const sizes = [data, data, contributions, contributions, machines.worldSize * HEADER_BYTES]
  return sizes.reduce((sum, bytes) => sum + Math.ceil(bytes / PAGE) * PAGE, 0)
}

/** A leader reduces at most a whole chunk of two machines, or of all of them its share. */
function chunkSizes({ count, ranks, worldSize }: Machines, chunkBytes: number): [number, number] {
  const most = Math.max(...ranks.map(({ length }) => length))
  const share = Math.ceil(chunkBytes / worldSize / CACHE_LINE) * CACHE_LINE * most
  const part = Math.ceil(chunkBytes / count / CACHE_LINE) * CACHE_LINE
  const whole = count === 2 ? chunkBytes : Math.min(chunkBytes, WHOLE_BYTES)
  return [chunkBytes, count * Math.max(share, part, whole)]
}

function ordinary(bytes: number): Region {
  return { bytes: new Uint8Array(bytes), start: 0 }
}

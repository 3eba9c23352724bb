import type { Collectives } from '../collectives.ts'
import { Tensor } from '../tensor.ts'
import type { ProfileEvent } from './profiler.ts'

/** The events of every rank, in rank order, on all of them; all ranks call it together. @throws RankwiseError as `Collectives` */
export async function gatherProfile(
  events: readonly ProfileEvent[],
  collectives: Collectives,
): Promise<readonly (readonly ProfileEvent[])[]> {
  const own = new TextEncoder().encode(JSON.stringify(events))
  const { data: counts } = await collectives.allGather(Tensor.int32([1], [own.length]))
  const lengths = Array.from(counts, Number)
  const size = Math.max(...lengths)
  // An all-gather takes as much of every rank.
  const padded = new Uint8Array(size)
  padded.set(own)
  const { data } = await collectives.allGather(new Tensor('uint8', [1, size], padded))
  return lengths.map((length, rank) => {
    const text = (data as Uint8Array).subarray(rank * size, rank * size + length)
    return JSON.parse(new TextDecoder().decode(text)) as ProfileEvent[]
  })
}

import { createHash } from 'node:crypto'
import { type Collectives, RankwiseError, Tensor } from '@rankwise/core'
import type { Conditions } from './conditions.ts'
import type { ResolvedOptions } from './generation-options.ts'

/** Bytes of a sha256. */
const HASH_BYTES = 32

/**
 * Compares what the ranks were asked for. Ranks that draw different pictures would add parts of one to the other, and
 * nobody would notice.
 *
 * @throws RankwiseError `OPTIONS_DIFFER` on every rank, and those of the collectives
 */
export async function requireSameRequest(
  options: ResolvedOptions,
  conditions: Conditions,
  collectives: Collectives | undefined,
  signal: AbortSignal | undefined,
): Promise<void> {
  if (collectives === undefined) return
  const own = new Tensor('uint8', [1, HASH_BYTES], requestHash(options, conditions))
  const all = (await collectives.allGather(own, { signal })).data as Uint8Array
  const hashes = Array.from({ length: collectives.worldSize }, (_, rank) =>
    Buffer.from(all.subarray(rank * HASH_BYTES, (rank + 1) * HASH_BYTES)).toString('hex'),
  )
  const different = hashes.flatMap((hash, rank) => (hash === hashes[0] ? [] : [rank]))
  if (different.length === 0) return
  throw new RankwiseError('OPTIONS_DIFFER', 'the ranks were asked for different pictures', {
    actual: { rank: collectives.rank, differentFromRank0: different },
    rule: 'all ranks call the pipeline with the same prompt, sizes, steps and guidance',
  })
}

function requestHash(options: ResolvedOptions, { prompt, negative }: Conditions): Uint8Array {
  const hash = createHash('sha256').update(JSON.stringify(options))
  for (const condition of [prompt, negative]) {
    if (condition === undefined) continue
    const { data, shape } = condition.embeds
    hash.update(`[${shape.join()}]`).update(new Uint8Array(data.buffer, data.byteOffset, data.byteLength))
  }
  return hash.digest()
}

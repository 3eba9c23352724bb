import { availableParallelism } from 'node:os'
import { type Environment, RankwiseError, rendezvousFromEnv } from '@rankwise/core'

/**
 * As many threads as the ranks on this machine can have without sharing cores; at least 1.
 *
 * @param env @default process.env
 * @throws RankwiseError `RENDEZVOUS_ENV`
 */
export function defaultThreads(env: Environment = process.env): number {
  const { localWorldSize } = rendezvousFromEnv(env)
  return Math.max(1, Math.floor(availableParallelism() / localWorldSize))
}

/** @throws RankwiseError `BACKEND_THREADS` */
export function checkThreads(threads: number): number {
  if (Number.isSafeInteger(threads) && threads >= 1) return threads
  throw new RankwiseError('BACKEND_THREADS', 'the number of threads is not valid', {
    actual: { threads },
    rule: 'threads is an integer of at least 1',
  })
}

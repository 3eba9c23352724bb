import { RankwiseError } from '../errors.ts'
import type { StoreWaitOptions } from '../store.ts'

/** How an operation of a store ends without a result. */
export interface WaitOptions extends StoreWaitOptions {
  /** What is waited for: a key, or an address. */
  readonly where: string
  readonly timeoutMs: number
  /** Makes the pending work stop, when nobody waits for it any more. */
  readonly stop: () => void
}

/**
 * The result of `pending`, unless the time is over or the signal is aborted first. Keeps the process alive meanwhile,
 * which connections of a store do not.
 *
 * @throws RankwiseError `RENDEZVOUS_TIMEOUT`, `ABORTED`; and what `pending` fails with
 */
export async function waitFor<T>(pending: Promise<T>, { where, timeoutMs, signal, stop }: WaitOptions): Promise<T> {
  let giveUp: (error: Error) => void = () => {}
  const given = new Promise<never>((_, reject) => {
    giveUp = reject
  })
  const abort = () => giveUp(aborted(where, signal?.reason))
  const timer = setTimeout(() => giveUp(timedOut(where, timeoutMs)), timeoutMs)
  signal?.addEventListener('abort', abort)
  if (signal?.aborted === true) abort()
  try {
    return await Promise.race([pending, given])
  } catch (error) {
    pending.catch(() => {})
    stop()
    throw error
  } finally {
    clearTimeout(timer)
    signal?.removeEventListener('abort', abort)
  }
}

function aborted(where: string, cause: unknown): RankwiseError {
  return new RankwiseError('ABORTED', 'the rendezvous was aborted', { where, cause })
}

function timedOut(where: string, timeoutMs: number): RankwiseError {
  return new RankwiseError('RENDEZVOUS_TIMEOUT', 'what another rank tells did not come in time', {
    where,
    actual: { timeoutMs },
    rule: 'every rank joins within timeoutMs',
    remedy: 'look for the first error of the other ranks, and check that all were started',
  })
}

/** @returns the error of an operation that came after `close` */
export function storeClosed(where: string): RankwiseError {
  return new RankwiseError('STORE_CLOSED', 'the store is closed', {
    where,
    rule: 'a store is used until it is closed',
  })
}

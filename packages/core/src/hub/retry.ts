import { setTimeout as sleep } from 'node:timers/promises'
import { throwIfAborted } from '../abort.ts'
import { type HubPlace, hubError } from './hub-error.ts'
import type { RetryPolicy } from './hub-options.ts'
import { TransientError } from './transient-error.ts'

/** How `retrying` tries. */
export interface RetryOptions {
  readonly policy: RetryPolicy
  readonly place: HubPlace
  readonly signal?: AbortSignal | undefined
  /** Bytes that have arrived for good so far, by all attempts. @default none ever do */
  readonly progress?: () => number
}

/**
 * Bytes from which an attempt counts as progress, so that the next failure is the first again. A server that sends a
 * few bytes and hangs up, over and over, is given up.
 */
const PROGRESS_BYTES = 64 * 1024

/**
 * Runs `attempt` until it does not fail, or fails for good, or has failed too often in a row.
 *
 * @throws RankwiseError `HUB_NETWORK`, `ABORTED`, and what `attempt` throws unless it is a `TransientError`
 */
export async function retrying<T>(attempt: () => Promise<T>, options: RetryOptions): Promise<T> {
  const { policy, progress = () => 0, signal } = options
  for (let failed = 0, total = 1; ; total++) {
    const before = progress()
    try {
      throwIfAborted(signal, options.place.repo)
      return await attempt()
    } catch (error) {
      throwIfAborted(signal, options.place.repo)
      if (!(error instanceof TransientError)) throw error
      failed = progress() - before >= PROGRESS_BYTES ? 1 : failed + 1
      const waitMs = waitBefore(failed, error, policy)
      if (failed >= policy.attempts || waitMs > policy.maxDelayMs) throw givenUp(error, total, waitMs, options)
      await pause(waitMs, options)
    }
  }
}

/** Doubles from wait to wait. Up to half of it is left to chance, so that ranks that failed together do not return together. */
function waitBefore(failed: number, { retryAfterMs }: TransientError, { delayMs, maxDelayMs }: RetryPolicy): number {
  if (retryAfterMs !== undefined) return retryAfterMs
  const delay = Math.min(delayMs * 2 ** (failed - 1), maxDelayMs)
  return delay * (1 - Math.random() / 2)
}

async function pause(ms: number, { signal, place }: RetryOptions): Promise<void> {
  try {
    await sleep(ms, undefined, signal === undefined ? {} : { signal })
  } catch (error) {
    throwIfAborted(signal, place.repo)
    throw error
  }
}

function givenUp(error: TransientError, attempts: number, waitMs: number, { policy, place }: RetryOptions) {
  const { message: problem, status, retryAfterMs } = error
  return hubError('HUB_NETWORK', 'the hub cannot be reached, or the connection keeps breaking', place, {
    actual: {
      problem,
      attempts,
      ...(status === undefined ? {} : { status }),
      ...(retryAfterMs === undefined ? {} : { retryAfterMs: waitMs, longestWaitMs: policy.maxDelayMs }),
    },
    remedy: 'check the network, proxy and HF_ENDPOINT and try again: a download goes on where it stopped',
  })
}

/**
 * How long an answer asks to wait: `Retry-After` in seconds or as a date, or the `t` of the hub's `RateLimit` header
 * (draft-ietf-httpapi-ratelimit-headers), in milliseconds.
 */
export function retryAfterOf(headers: Headers): number | undefined {
  const retryAfter = headers.get('retry-after')?.trim()
  if (retryAfter !== undefined && /^\d+$/.test(retryAfter)) return Number(retryAfter) * 1000
  const date = Date.parse(retryAfter ?? '')
  if (!Number.isNaN(date)) return Math.max(0, date - Date.now())
  const seconds = /;\s*t\s*=\s*(\d+)/.exec(headers.get('ratelimit') ?? '')?.[1]
  return seconds === undefined ? undefined : Number(seconds) * 1000
}

import { throwIfAborted } from '../abort.ts'
import { networkFailure, TransientError } from './transient-error.ts'

/** Bytes that have to arrive within the timeout: a server that drips is as good as one that hangs. */
const MIN_BYTES = 16 * 1024

/** Parts that the timeout is counted in. */
const TICKS = 10

/**
 * Watches one request: ends it when it is aborted, or when its server lets it wait. Only time spent waiting counts, not
 * what the receiver does meanwhile, be it that it blocks the event loop for longer than the timeout: a tick that comes
 * late counts as one.
 */
export class StallGuard {
  /** For the request. */
  readonly signal: AbortSignal
  readonly #stalled = new AbortController()
  readonly #aborted: AbortSignal | undefined
  readonly #timeoutMs: number
  #waitedMs = 0
  #bytes = 0

  constructor(timeoutMs: number, aborted: AbortSignal | undefined) {
    this.#timeoutMs = timeoutMs
    this.#aborted = aborted
    this.signal = aborted === undefined ? this.#stalled.signal : AbortSignal.any([aborted, this.#stalled.signal])
  }

  /**
   * Waits for the next part of the answer, and counts what it brought.
   *
   * @throws TransientError when the network fails or the server is too slow; RankwiseError `ABORTED`
   */
  async next<T>(part: Promise<T>, bytesOf: (value: T) => number): Promise<T> {
    const tickMs = this.#timeoutMs / TICKS
    let countedAt = performance.now()
    const count = () => {
      const now = performance.now()
      this.#waitedMs += Math.min(now - countedAt, tickMs)
      countedAt = now
      if (this.#waitedMs >= this.#timeoutMs) this.#stalled.abort()
    }
    const timer = setInterval(count, tickMs)
    try {
      const value = await unlessAborted(part, this.signal)
      this.#bytes += bytesOf(value)
      if (this.#bytes < MIN_BYTES) count()
      else this.#waitedMs = this.#bytes = 0
      if (this.#stalled.signal.aborted) throw this.#stalled.signal.reason
      return value
    } catch (error) {
      throwIfAborted(this.#aborted)
      throw this.#stalled.signal.aborted
        ? new TransientError(`less than ${MIN_BYTES} bytes in ${this.#timeoutMs} ms`)
        : networkFailure(error)
    } finally {
      clearInterval(timer)
    }
  }
}

/**
 * `fetch` of Node 20 does not always fail when it is aborted: a body that is read was seen to wait for ever, in one of
 * ten runs of 600 random faults. So its answer is not waited for.
 */
async function unlessAborted<T>(part: Promise<T>, signal: AbortSignal): Promise<T> {
  let fail = () => {}
  const aborted = new Promise<never>((_, reject) => {
    fail = () => reject(signal.reason)
  })
  signal.addEventListener('abort', fail)
  if (signal.aborted) fail()
  return Promise.race([part, aborted]).finally(() => signal.removeEventListener('abort', fail))
}

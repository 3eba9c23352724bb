import { throwIfAborted } from '../abort.ts'

/** How `inParallel` works. */
export interface ParallelOptions {
  /** Items that are worked on at once; they are begun in order. */
  readonly limit: number
  readonly signal: AbortSignal | undefined
}

/**
 * Works on some items and returns the results in their order. When one fails, the others are aborted, and the first
 * error is thrown once all have ended: nothing goes on in the background.
 */
export async function inParallel<T, R>(
  items: readonly T[],
  work: (item: T, signal: AbortSignal) => Promise<R>,
  { limit, signal: outer }: ParallelOptions,
): Promise<readonly R[]> {
  const stop = new AbortController()
  const signal = outer === undefined ? stop.signal : AbortSignal.any([outer, stop.signal])
  const results: R[] = []
  const failures: unknown[] = []
  const queue = items.entries()
  const worker = async () => {
    for (const [i, item] of queue) {
      if (signal.aborted) return
      results[i] = await work(item, signal)
    }
  }
  const fail = (error: unknown) => {
    failures.push(error)
    stop.abort()
  }
  await Promise.all(Array.from({ length: limit }, () => worker().catch(fail)))
  throwIfAborted(outer)
  if (failures.length > 0) throw failures[0]
  return results
}

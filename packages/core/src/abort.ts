import { RankwiseError } from './errors.ts'

/**
 * @param where - what would be interrupted, for the message
 * @throws RankwiseError `ABORTED`
 */
export function throwIfAborted(signal: AbortSignal | undefined, where?: string): void {
  if (signal?.aborted !== true) return
  throw new RankwiseError('ABORTED', 'the operation was aborted', {
    ...(where === undefined ? {} : { where }),
    cause: signal.reason,
  })
}

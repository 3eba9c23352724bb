import { readFileSync } from 'node:fs'
import { type Environment, RankwiseError, rendezvousFromEnv } from '@rankwise/core'

/** Processors of the threads that compute, one each. */
export interface ThreadPlacement {
  /** Of the thread that runs a segment. */
  readonly first: number
  /** Of those that help it, as ONNX Runtime takes them: counted from 1, with semicolons. Undefined where there are none. */
  readonly pool: string | undefined
}

/**
 * As many processors as there are threads, other ones for every rank on this machine.
 *
 * @param allowed - numbers of the processors that the process may use. @default as Linux says
 * @throws RankwiseError `BACKEND_PINNING` when there are too few, or the system does not say which there are
 */
export function placeThreads(
  threads: number,
  allowed: readonly number[] = allowedProcessors(),
  env: Environment = process.env,
): ThreadPlacement {
  const { localRank, localWorldSize } = rendezvousFromEnv(env)
  const [first, ...pool] = allowed.slice(localRank * threads, (localRank + 1) * threads)
  if (first === undefined || pool.length < threads - 1) {
    throw pinningError('there are too few processors', { threads, localWorldSize, processors: allowed.length })
  }
  return { first, pool: pool.length === 0 ? undefined : pool.map((processor) => processor + 1).join(';') }
}

/** @throws RankwiseError `BACKEND_PINNING` */
function allowedProcessors(): readonly number[] {
  let status = ''
  try {
    status = readFileSync('/proc/self/status', 'utf8')
  } catch (cause) {
    throw pinningError('the system does not say which processors there are', { platform: process.platform }, cause)
  }
  return parseProcessors(/^Cpus_allowed_list:\s*(\S+)$/m.exec(status)?.[1] ?? '')
}

/** Numbers in a list as Linux writes it: `0-3,8`. */
export function parseProcessors(list: string): readonly number[] {
  return list.split(',').flatMap((range) => {
    const [first = 0, last = first] = range.split('-').map(Number)
    return Array.from({ length: last - first + 1 }, (_, i) => first + i)
  })
}

/** An error that says why threads cannot be pinned. */
export function pinningError(
  reason: string,
  actual: Readonly<Record<string, unknown>>,
  cause?: unknown,
): RankwiseError {
  return new RankwiseError('BACKEND_PINNING', `threads cannot be pinned: ${reason}`, {
    actual,
    rule: 'with pinThreads, every thread of every rank on the machine has a processor of its own, on the engine capi',
    remedy: 'take fewer threads or ranks, or leave pinThreads out',
    cause,
  })
}

import { setTimeout as delay } from 'node:timers/promises'
import type { Collectives } from './collectives.ts'
import { RankwiseError } from './errors.ts'
import { exchangeReports, type Outcome, outcomeOf, type RankReport, reportOf } from './rank-report.ts'
import { Turns } from './turns.ts'

/** How `loadTogether` works. */
export interface LoadTogetherOptions<T> {
  /** The group whose ranks load one model; undefined for a rank that loads alone. */
  readonly collectives: Collectives | undefined
  /** Aborting it on one rank stops all. */
  readonly signal?: AbortSignal | undefined
  /** Frees what this rank has loaded, when another has failed. */
  readonly release: (loaded: T) => void | Promise<void>
}

/**
 * How often ranks ask each other, in milliseconds: the longest that a rank goes on after another has failed, beside one
 * call to the disk or the network. A question takes less than 0.1 ms between the ranks of one machine.
 */
const INTERVAL_MS = 100

const turns = new Turns()

/**
 * Loads a model on all ranks of a group, or on none: while a rank loads, it hears of the failures of the others, and all
 * wait for the last. Where one rank fails or is aborted, `load` is aborted on the others, through the signal that it is
 * given, and what they have loaded is freed.
 *
 * Ranks ask each other all the time, from the call on. So every rank calls it as soon as it has a group and leaves
 * everything that can fail to `load`; and neither `load` nor anyone else uses the group meanwhile. What has to use it,
 * such as opening a repository that rank 0 names the commit of, ends before the call, and fails in `load`:
 *
 *     const opening = openPretrained(id, { collectives })
 *     await opening.catch(() => {})
 *     return loadTogether(async (signal) => load(await opening, signal), { collectives, signal, release })
 *
 * Loads of one group that are begun at the same time, in the same order on all ranks, run one after the other.
 *
 * @param load - gets a signal that is aborted with this rank's own and when another rank fails
 * @throws what `load` threw on this rank; `LOAD_FAILED_ELSEWHERE` with the number, the code and the message of the
 *   first rank that failed; those of `Collectives`
 */
export async function loadTogether<T>(
  load: (signal: AbortSignal) => Promise<T>,
  { collectives, signal: own, release }: LoadTogetherOptions<T>,
): Promise<T> {
  const stop = new AbortController()
  const signal = own === undefined ? stop.signal : AbortSignal.any([own, stop.signal])
  if (collectives === undefined || collectives.worldSize === 1) return load(signal)
  using _turn = await turns.take(collectives)
  const outcome = outcomeOf(() => load(signal))
  try {
    await agree(outcome, collectives, own)
  } catch (error) {
    stop.abort(error)
    const settled = await outcome
    if ('value' in settled) await release(settled.value)
    throw error
  }
  return ((await outcome) as { readonly value: T }).value
}

/** Resolves when every rank has loaded. @throws as `loadTogether` */
async function agree(
  outcome: Promise<Outcome<unknown>>,
  collectives: Collectives,
  signal: AbortSignal | undefined,
): Promise<void> {
  // Every rank sees the same reports, so all take part in as many exchanges, whichever fails, and when.
  for (;;) {
    const own = stateOf(await outcomeWithin(outcome, INTERVAL_MS), signal)
    const states = await exchange(own, collectives)
    if (states.every(({ kind }) => kind === 'loaded')) return
    const rank = states.findIndex(({ kind }) => kind === 'failed')
    if (rank < 0) continue
    throw own.kind === 'failed' ? own.error : failedElsewhere(rank, states[rank] as Report)
  }
}

/** How far this rank is. */
type State = { readonly kind: 'loading' | 'loaded' } | { readonly kind: 'failed'; readonly error: unknown }

function stateOf(outcome: Outcome<unknown> | undefined, signal: AbortSignal | undefined): State {
  if (outcome !== undefined && 'error' in outcome) return { kind: 'failed', error: outcome.error }
  // It may have loaded and wait for the others, or not have noticed yet.
  if (signal?.aborted) {
    return { kind: 'failed', error: new RankwiseError('ABORTED', 'the load was aborted', { cause: signal.reason }) }
  }
  return { kind: outcome === undefined ? 'loading' : 'loaded' }
}

/** The outcome, or undefined when it is still open after that time. */
async function outcomeWithin<T>(outcome: Promise<Outcome<T>>, milliseconds: number): Promise<Outcome<T> | undefined> {
  const timer = new AbortController()
  const expired = delay(milliseconds, undefined, { signal: timer.signal }).catch(() => undefined)
  try {
    return await Promise.race([outcome, expired])
  } finally {
    timer.abort()
  }
}

type Report = RankReport<State['kind']>

/** What every rank says, in rank order. @throws this rank's own error, or else that of the collectives */
async function exchange(own: State, collectives: Collectives): Promise<readonly Report[]> {
  try {
    return await exchangeReports(reportOf(own.kind, own.kind === 'failed' ? own : undefined), collectives)
  } catch (error) {
    // The others learn from the collectives that something is wrong; here, why this rank failed is worth more.
    throw own.kind === 'failed' ? own.error : error
  }
}

function failedElsewhere(rank: number, { code, message }: Report): RankwiseError {
  return new RankwiseError('LOAD_FAILED_ELSEWHERE', `rank ${rank} failed to load`, {
    actual: { rank, code, message },
    rule: 'the ranks of a group load a model together or not at all',
  })
}

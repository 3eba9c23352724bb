import { once } from 'node:events'
import { setTimeout as delay } from 'node:timers/promises'
import { throwIfAborted } from './abort.ts'
import type { Collectives } from './collectives.ts'
import { RankwiseError } from './errors.ts'
import { exchangeReports, type Outcome, outcomeOf, type RankReport, reportOf } from './rank-report.ts'
import { turns } from './turns.ts'

/**
 * Has rank 0 do something on which all ranks of a load depend, and gives all of them the text that comes of it: at most
 * 1000 bytes. Every rank calls it; where it fails on rank 0, the load fails there. A load has one such text, and loads that
 * are part of it have the same.
 *
 * @throws what `work` threw on rank 0; RankwiseError `ABORTED`, `LOAD_DIFFERS` where the text is another than before
 */
export type FromFirst = (work: () => Promise<string>) => Promise<string>

/**
 * Tells the other ranks with which options this one loads, by name: where one has told another value, the load fails on
 * all. A load tells its own once it has checked them, in all at most 900 bytes. Nobody hears what a part of a load tells:
 * that is for the load around it.
 */
export type SayOptions = (options: Readonly<Record<string, string>>) => void

/** How `loadTogether` works. */
export interface LoadTogetherOptions<T> {
  /** The group whose ranks load one model; undefined for a rank that loads alone. */
  readonly collectives: Collectives | undefined
  /** Aborting it on one rank stops all. */
  readonly signal?: AbortSignal | undefined
  /** Frees what this rank has loaded, when another has failed. */
  readonly release: (loaded: T) => void | Promise<void>
  /**
   * What a load around this one was given: this one is part of it then, and the ranks agree on the whole. Parts may run at
   * the same time, and in another order on every rank. @default a load that the ranks agree on by itself
   */
  readonly within?: FromFirst | undefined
  /** What the ranks do, for the error of those on which it did not fail. @default 'load' */
  readonly work?: 'load' | 'encode'
}

/**
 * How often ranks ask each other, in milliseconds: the longest that a rank goes on after another has failed, beside one
 * call to the disk or the network. A question takes less than 0.1 ms between the ranks of one machine.
 */
const INTERVAL_MS = 100

/**
 * Loads a model on all ranks of a group, or on none: while a rank loads, it hears of the failures of the others, and all
 * wait for the last. Where one rank fails or is aborted, `load` is aborted on the others, through the signal that it is
 * given, and what they have loaded is freed.
 *
 * Ranks ask each other all the time, from the call on. So every rank calls it as soon as it has a group, before anything
 * that takes time, and leaves everything that can fail to `load`; and neither `load` nor anyone else uses the group
 * meanwhile. What all ranks have to know of rank 0, such as the commit that a branch stands for, travels with the answers:
 *
 *     const load = async (signal: AbortSignal, fromFirst: FromFirst) =>
 *       read(await openPretrained(id, { fromFirst, signal }), signal)
 *     return loadTogether(load, { collectives, signal, release })
 *
 * So do the options that the ranks have to share: a load names its own, and differences are refused on all ranks.
 *
 * Loads of one group that are begun at the same time, in the same order on all ranks, run one after the other.
 *
 * @param load - gets a signal that is aborted with this rank's own and when another rank fails
 * @throws what `load` threw on this rank; `LOAD_FAILED_ELSEWHERE` (`ENCODE_FAILED_ELSEWHERE`) with the number, the code and the message of the
 *   first rank that failed; `LOAD_DIFFERS` when not all ranks ask rank 0, or with other options; those of `Collectives`
 */
export async function loadTogether<T>(
  load: (signal: AbortSignal, fromFirst: FromFirst, sayOptions: SayOptions) => Promise<T>,
  { collectives, signal: own, release, within, work = 'load' }: LoadTogetherOptions<T>,
): Promise<T> {
  const stop = new AbortController()
  const signal = own === undefined ? stop.signal : AbortSignal.any([own, stop.signal])
  if (within !== undefined) return load(signal, within, unheard)
  if (collectives === undefined || collectives.worldSize === 1) return load(signal, (work) => work(), unheard)
  using _turn = await turns.take(collectives)
  const word = new WordOfFirst(collectives.rank, signal)
  const said: Record<string, string> = {}
  const sayOptions: SayOptions = (options) => void Object.assign(said, options)
  const outcome = outcomeOf(() => load(signal, (work) => word.get(work), sayOptions))
  try {
    await agree(outcome, { word, said }, collectives, { work, signal: own })
  } catch (error) {
    stop.abort(error)
    const settled = await outcome
    if ('value' in settled) await release(settled.value)
    throw error
  }
  return ((await outcome) as { readonly value: T }).value
}

const unheard: SayOptions = () => {}

/** Resolves when every rank has loaded. @throws as `loadTogether` */
async function agree(
  outcome: Promise<Outcome<unknown>>,
  { word, said }: Told,
  collectives: Collectives,
  { work, signal }: { readonly work: string; readonly signal: AbortSignal | undefined },
): Promise<void> {
  // Every rank sees the same reports, so all take part in as many exchanges, whichever fails, and when.
  for (;;) {
    const own = stateOf(await outcomeWithin(outcome, INTERVAL_MS), work, signal)
    const states = await exchange(own, { word, said }, collectives)
    const rank = states.findIndex(({ kind }) => kind === 'failed')
    if (rank < 0) {
      requireSameKind(states)
      requireSameOptions(states)
      if (states.every(({ kind }) => kind === 'loaded')) return
      word.hear(states[0] as Report)
      continue
    }
    throw own.kind === 'failed' ? own.error : failedElsewhere(work, rank, states[rank] as Report)
  }
}

/** How far this rank is. */
type State = { readonly kind: 'loading' | 'loaded' } | { readonly kind: 'failed'; readonly error: unknown }

function stateOf(outcome: Outcome<unknown> | undefined, work: string, signal: AbortSignal | undefined): State {
  if (outcome !== undefined && 'error' in outcome) return { kind: 'failed', error: outcome.error }
  // It may have loaded and wait for the others, or not have noticed yet.
  if (signal?.aborted) {
    return { kind: 'failed', error: new RankwiseError('ABORTED', `the ${work} was aborted`, { cause: signal.reason }) }
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

/** What a rank tells the others beside its state. */
interface Told {
  readonly word: WordOfFirst
  /** What it has said of its options so far. */
  readonly said: Options
}

type Options = Readonly<Record<string, string>>

/** `message` is what rank 0 says, or the error of a rank that has failed. */
interface Report extends RankReport<State['kind']> {
  readonly options: Options
}

/** The code of a rank whose load depends on what rank 0 says; its message, on rank 0, is what it says. */
const ASKED = 'ASKED'

/** @throws RankwiseError `LOAD_DIFFERS`, on all ranks, when one has loaded without asking rank 0 and another asks */
function requireSameKind(states: readonly Report[]): void {
  const asking = states.findIndex(({ code }) => code === ASKED)
  const silent = states.findIndex(({ kind, code }) => kind === 'loaded' && code !== ASKED)
  if (asking < 0 || silent < 0) return
  throw new RankwiseError('LOAD_DIFFERS', `rank ${silent} loads from a folder, and rank ${asking} from a hub`, {
    rule: 'all ranks load the same model: from a folder on all of them, or by the same id',
    remedy: 'check that the folder is there on every rank',
  })
}

/** What every rank says, in rank order. @throws this rank's own error, or else that of the collectives */
async function exchange(own: State, { word, said }: Told, collectives: Collectives): Promise<readonly Report[]> {
  const code = word.isAsked ? ASKED : ''
  // Options are a line of JSON before the word.
  const told = `${JSON.stringify(said)}\n${word.text}`
  const report = own.kind === 'failed' ? reportOf(own.kind, own) : { kind: own.kind, code, message: told }
  try {
    return (await exchangeReports(report, collectives)).map(withOptions)
  } catch (error) {
    // The others learn from the collectives that something is wrong; here, why this rank failed is worth more.
    throw own.kind === 'failed' ? own.error : error
  }
}

function withOptions(report: RankReport<State['kind']>): Report {
  if (report.kind === 'failed') return { ...report, options: {} }
  const end = report.message.indexOf('\n')
  const options = JSON.parse(report.message.slice(0, end)) as Options
  return { ...report, options, message: report.message.slice(end + 1) }
}

/** @throws RankwiseError `LOAD_DIFFERS`, on all ranks, with what every rank has said of each option that differs */
function requireSameOptions(reports: readonly Report[]): void {
  const names = [...new Set(reports.flatMap(({ options }) => Object.keys(options)))]
  const valuesOf = (name: string) => reports.map(({ options }) => options[name])
  const different = names.filter((name) => new Set(valuesOf(name).filter((value) => value !== undefined)).size > 1)
  if (different.length === 0) return
  throw new RankwiseError('LOAD_DIFFERS', `the ranks were given another ${different.join(', another ')}`, {
    where: different[0] as string,
    actual: Object.fromEntries(different.map((name) => [name, valuesOf(name).map((value) => value ?? 'nothing')])),
    rule: 'it is the same on all ranks of a group; here is what each of them was given, in rank order',
  })
}

/** What rank 0 has for the others: it tells it with its state, and they wait until they hear it. */
class WordOfFirst {
  /** Whether the load depends on it. */
  isAsked = false
  /** On rank 0, once it is there. */
  text = ''
  readonly #rank: number
  readonly #signal: AbortSignal
  readonly #heard: Promise<string>
  #resolve: (text: string) => void = () => {}

  constructor(rank: number, signal: AbortSignal) {
    this.#rank = rank
    this.#signal = signal
    this.#heard = new Promise((resolve) => {
      this.#resolve = resolve
    })
  }

  async get(work: () => Promise<string>): Promise<string> {
    this.isAsked = true
    if (this.#rank > 0) return this.#wait()
    const text = await work()
    if (this.text !== '' && this.text !== text) {
      throw new RankwiseError('LOAD_DIFFERS', 'parts of a load follow different words of rank 0', {
        actual: { first: this.text, next: text },
        rule: 'what is loaded together is of one commit',
      })
    }
    this.text = text
    return text
  }

  /** Takes note of what rank 0 says. */
  hear({ message }: Report): void {
    if (message !== '') this.#resolve(message)
  }

  async #wait(): Promise<string> {
    const aborted = new AbortController()
    const stopped = once(this.#signal, 'abort', { signal: aborted.signal }).catch(() => {})
    try {
      throwIfAborted(this.#signal)
      const text = await Promise.race([this.#heard, stopped])
      throwIfAborted(this.#signal)
      return text as string
    } finally {
      aborted.abort()
    }
  }
}

function failedElsewhere(work: string, rank: number, { code, message }: Report): RankwiseError {
  return new RankwiseError(`${work.toUpperCase()}_FAILED_ELSEWHERE`, `rank ${rank} failed to ${work}`, {
    actual: { rank, code, message },
    rule: `the ranks of a group ${work} together or not at all`,
  })
}

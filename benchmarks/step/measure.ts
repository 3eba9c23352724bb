import type { ChildProcess } from 'node:child_process'
import { EventEmitter, once } from 'node:events'
import { createInterface } from 'node:readline'
import type { Readable, Writable } from 'node:stream'
import { runProcess } from '../backends/run-process.ts'
import { MemorySampler } from '../memory-sampler.ts'
import type { RankCommand } from '../rank-command.ts'
import { rankEnvironment } from '../rank-environment.ts'
import type { StepReport } from './job.ts'

/** Steps of all ranks together. */
export interface Measurement {
  /** Of every step that counts: what the slowest rank took. */
  readonly seconds: readonly number[]
  /** In all-reduces, per step, on the rank that waited least there: what the exchange itself takes. */
  readonly allReduceSeconds: number | null
  /** Largest anonymous memory of a rank from its start until it was warm. */
  readonly peakAnonBytes: number
  /** The part of it that are weights, on that rank. */
  readonly readBytes: number | null
  readonly eventLoopMilliseconds: number | null
}

interface RankMeasurement extends StepReport {
  readonly peakAnonBytes: number
}

/** @throws Error with what a rank printed if it fails; no rank is left then */
export async function measureStep(command: RankCommand, tp: number, signal: AbortSignal): Promise<Measurement> {
  const failed = new AbortController()
  const warm = new Meeting(tp)
  const stopped = AbortSignal.any([signal, failed.signal])
  const ranks = (await rankEnvironment(tp)).map(async (variables) => {
    const env = { ...command.env, ...variables }
    try {
      const measured = await runProcess({ ...command, env }, stopped, (child) => watch(child, warm, stopped))
      if (measured !== undefined) return measured
      throw new Error('a rank ended well without a report')
    } catch (error) {
      failed.abort(error)
      throw error
    }
  })
  const outcomes = await Promise.allSettled(ranks)
  if (failed.signal.aborted) throw failed.signal.reason
  return together(outcomes.map((outcome) => (outcome as PromiseFulfilledResult<RankMeasurement>).value))
}

/** `undefined` if the process ends without a report. */
async function watch(
  { pid, stdin, stdio }: ChildProcess,
  warm: Meeting,
  signal: AbortSignal,
): Promise<RankMeasurement | undefined> {
  // If it ends meanwhile, its exit code says more.
  stdin?.on('error', () => {})
  const sampler = new MemorySampler(pid === undefined ? [] : [pid])
  try {
    const lines = createInterface({ input: stdio[3] as Readable })[Symbol.asyncIterator]()
    if ((await lines.next()).value !== 'warm') return undefined
    const { ranks } = sampler.stop()
    await warm.all(signal)
    ;(stdin as Writable).end('\n')
    const { value } = await lines.next()
    if (value === undefined) return undefined
    return { ...(JSON.parse(value) as StepReport), peakAnonBytes: ranks[0]?.anonBytes ?? 0 }
  } finally {
    sampler.stop()
  }
}

/** Lets nobody go on before all are there: a rank that is looked at is slower than one that is not. */
class Meeting {
  #missing: number
  readonly #events = new EventEmitter()

  constructor(count: number) {
    this.#missing = count
  }

  async all(signal: AbortSignal): Promise<void> {
    this.#missing--
    if (this.#missing > 0) await once(this.#events, 'complete', { signal })
    else this.#events.emit('complete')
  }
}

function together(ranks: readonly RankMeasurement[]): Measurement {
  const [first] = ranks as [RankMeasurement]
  const count = first.seconds.length
  const worst = ranks.reduce((a, b) => (b.peakAnonBytes > a.peakAnonBytes ? b : a))
  const least = (values: readonly (number | null)[]) =>
    values.includes(null) ? null : Math.min(...(values as number[]))
  const most = (values: readonly (number | null)[]) =>
    values.includes(null) ? null : Math.max(...(values as number[]))
  const allReduce = least(ranks.map(({ allReduceSeconds }) => allReduceSeconds))
  return {
    seconds: Array.from({ length: count }, (_, i) => Math.max(...ranks.map(({ seconds }) => seconds[i] as number))),
    allReduceSeconds: allReduce === null ? null : allReduce / count,
    peakAnonBytes: worst.peakAnonBytes,
    readBytes: worst.readBytes,
    eventLoopMilliseconds: most(ranks.map(({ eventLoopMilliseconds }) => eventLoopMilliseconds)),
  }
}

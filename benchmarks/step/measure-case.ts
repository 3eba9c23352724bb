import type { Engine } from './engine.ts'
import type { Job, StepCase } from './job.ts'
import { type Measurement, measureStep } from './measure.ts'
import type { Peak } from './peak.ts'
import { type Row, rowOf } from './row.ts'

/** A warm-up compiles, and lets allocators grow. */
const WARM_UP = { seconds: 1, most: 2 }

const WATCHED = { seconds: 5, most: 2 }

/** How a case is measured. */
export interface CaseOptions {
  readonly engines: readonly Engine[]
  readonly repeat: number
  /** Steps of each round. */
  readonly steps: number
  /** Whether the threads of the engine capi have processors of their own. */
  readonly pinThreads: boolean
  /** The checkpoint. */
  readonly folder: string
  /** Of a step. */
  readonly flops: number
  readonly peak: Peak | undefined
  /** File for a trace of the first engine of Rankwise. */
  readonly trace: string | undefined
  readonly signal: AbortSignal
  /** Called before every round (from 1), with what is measured. */
  readonly onRound: (round: number, what: string) => void
}

/** A row per engine that can run the case. They take turns, so that a machine that slows down does so for all of them. */
export async function measureCase(stepCase: StepCase, options: CaseOptions): Promise<readonly Row[]> {
  const { engines, repeat, steps, pinThreads, folder, trace, signal, onRound } = options
  const contestants = engines
    .filter(
      ({ dtypes, mostThreads = stepCase.threads }) =>
        dtypes.includes(stepCase.dtype) && stepCase.threads <= mostThreads,
    )
    .map((engine) => ({ engine, rounds: [] as Measurement[] }))
  for (let i = 0; i < repeat; i++) {
    for (const { engine, rounds } of contestants) {
      onRound(i + 1, engine.name)
      const job: Job = {
        ...stepCase,
        backend: engine.backend,
        engine: engine.engine,
        folder,
        pinThreads: pinThreads && engine.engine === 'capi',
        warmUp: WARM_UP,
        timed: { seconds: 60, most: steps },
        watched: WATCHED,
        trace: engine === contestants[0]?.engine ? trace : undefined,
      }
      rounds.push(await measureStep(engine.command(job), stepCase.tp, signal))
    }
  }
  return contestants.map(({ engine, rounds }) => rowOf(engine, stepCase, rounds, options))
}

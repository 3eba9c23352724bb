import { join } from 'node:path'
import { readSafetensors } from '@rankwise/core'
import type { Engine } from './engine.ts'
import { type Results, worstRelativeRms } from './expected.ts'
import { type BlockCase, type BlockDType, type Job, TIMING, type Timing } from './job.ts'
import { measureBlock } from './measure.ts'
import { type CheckedMeasurement, type Row, rowOf } from './row.ts'

/** How a case is measured. */
export interface CaseOptions {
  readonly engines: readonly Engine[]
  readonly dtypes: readonly BlockDType[]
  readonly threads: number
  readonly repeat: number
  /** Where its files are. */
  readonly folder: string
  /** A folder for results. */
  readonly temporary: string
  readonly expected: Results
  readonly signal: AbortSignal
  /** Called before every process, with the round (from 1) and what is measured. */
  readonly onProcess?: (round: number, what: string) => void
  /** @default TIMING */
  readonly timing?: Timing
}

/** A row per engine and dtype that can run it. They take turns, so that a machine that slows down does so for all of them. */
export async function measureCase(blockCase: BlockCase, options: CaseOptions): Promise<readonly Row[]> {
  const { engines, dtypes, threads, repeat, onProcess } = options
  const contestants = dtypes.flatMap((dtype) =>
    engines
      .filter((engine) => engine.dtypes.includes(dtype) && threads <= (engine.mostThreads ?? threads))
      .map((engine) => ({ engine, dtype, rounds: [] as CheckedMeasurement[] })),
  )
  for (let i = 0; i < repeat; i++) {
    for (const { engine, dtype, rounds } of contestants) {
      onProcess?.(i + 1, `${engine.name} ${dtype}`)
      rounds.push(await measure(engine, blockCase, dtype, options))
    }
  }
  return contestants.map(({ engine, dtype, rounds }) => {
    return rowOf({ ...blockCase, backend: engine.name, dtype, threads }, rounds)
  })
}

async function measure(
  engine: Engine,
  blockCase: BlockCase,
  dtype: BlockDType,
  { threads, folder, temporary, expected, signal, timing = TIMING }: CaseOptions,
): Promise<CheckedMeasurement> {
  const output = join(temporary, 'results.safetensors')
  const job: Job = { ...blockCase, backend: engine.name, dtype, threads, folder, output, timing }
  const measurement = await measureBlock(engine.command(job), signal)
  return { ...measurement, relRms: worstRelativeRms(await readSafetensors(output), expected) }
}

import { existsSync } from 'node:fs'
import { rename, rm } from 'node:fs/promises'
import { availableParallelism } from 'node:os'
import { relativeRms } from '@rankwise/conformance/compare'
import { readSafetensors, type Tensor } from '@rankwise/core'
import { expectedFile } from './block-files.ts'
import { type Engine, rankCommand } from './engine.ts'
import type { BlockCase, Job } from './job.ts'
import { runProcess } from './run-process.ts'

export type Results = ReadonlyMap<string, Tensor>

/**
 * The results of a case in float64. They are kept in the folder; torch takes seconds to compute them, the plain loops of
 * core minutes.
 */
export async function expectedResults(
  folder: string,
  { block, tokens, tp }: BlockCase,
  torch: Engine | undefined,
  signal: AbortSignal,
): Promise<Results> {
  const path = expectedFile(folder, { block, tokens, tp })
  if (existsSync(path)) return readSafetensors(path)
  const output = `${path}.incomplete`
  const job: Job = {
    ...{ backend: torch === undefined ? 'reference' : 'torch', dtype: 'float64', threads: availableParallelism() },
    ...{ block, tokens, tp, folder, output },
  }
  const command = torch?.command(job) ?? rankCommand(job)
  try {
    await runProcess(command, signal, async () => undefined)
    await rename(output, path)
  } finally {
    await rm(output, { force: true })
  }
  return readSafetensors(path)
}

/** Of the result that is off most. */
export function worstRelativeRms(results: Results, expected: Results): number {
  const errors = [...expected].map(([name, tensor]) => relativeRms(results.get(name) as Tensor, tensor))
  return Math.max(...errors)
}

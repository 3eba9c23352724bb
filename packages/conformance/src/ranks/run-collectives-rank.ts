import { type CollectivesFactory, rendezvousFromEnv } from '@rankwise/core'
import { type CollectivesReport, type CollectivesTask, runScenario } from '../collectives/scenario.ts'
import { runRank } from './run-rank.ts'

/** Longest wait of the group in which a rank stands still for 5 s. */
const SHORT_TIMEOUT_MS = 1500
const TIMEOUT_MS = 60_000

/** The body of the `worker` module of `defineCollectivesConformance`. */
export function runCollectivesRank(create: CollectivesFactory): void {
  runRank(async (task: CollectivesTask): Promise<CollectivesReport> => {
    const timeoutMs = task.scenario === 'late' ? SHORT_TIMEOUT_MS : TIMEOUT_MS
    return runScenario(await create({ ...rendezvousFromEnv(), timeoutMs }), task)
  })
}

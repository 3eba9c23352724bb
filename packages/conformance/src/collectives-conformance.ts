import { defineChecks } from './check.ts'
import { type CollectivesOutcome, failureGroup, operationGroups } from './collectives/checks.ts'
import type { CollectivesReport } from './collectives/scenario.ts'
import { RankProcesses } from './ranks/rank-processes.ts'

/** What `defineCollectivesConformance` tests. */
export interface CollectivesConformanceOptions {
  /** A module that calls `runCollectivesRank`; every rank runs it in a process of its own, started as torchrun would. */
  readonly worker: URL
  /** @default [2, 4] */
  readonly worldSizes?: readonly number[]
  /**
   * `rank-order` where sums have the bits that adding in rank order gives; `close` where they only have the same bits on
   * all ranks. @default 'rank-order'
   */
  readonly sums?: 'rank-order' | 'close'
}

/**
 * Defines the tests that every collectives package passes: every operation in every dtype, the same bits on all ranks,
 * refusals, and what becomes of a group whose rank leaves, aborts, is killed or does not come.
 */
export function defineCollectivesConformance(options: CollectivesConformanceOptions): void {
  const { worker, worldSizes = [2, 4], sums = 'rank-order' } = options
  const launch = async (worldSize: number, task: unknown): Promise<readonly CollectivesOutcome[]> => {
    await using ranks = await RankProcesses.start<CollectivesReport>(worldSize, worker, task)
    return await ranks.outcomes
  }
  const subject = { launch, sums, worldSizes }
  defineChecks('collectives', [...operationGroups(subject), failureGroup(subject, { processes: true })])
}

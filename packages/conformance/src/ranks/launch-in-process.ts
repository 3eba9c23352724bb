import { type Collectives, RankwiseError } from '@rankwise/core'
import type { CollectivesOutcome, LaunchCollectives } from '../collectives/checks.ts'
import { runScenario } from '../collectives/scenario.ts'
import { InProcessGroup } from './in-process-group.ts'

/**
 * Runs scenarios on all ranks of one process.
 *
 * @param wrap - what a rank works with instead of its member of the group. @default the member
 */
export function launchInProcess(wrap: (member: Collectives) => Collectives = (member) => member): LaunchCollectives {
  return async (worldSize, task) => {
    const group = new InProcessGroup(worldSize)
    const ranks = Array.from({ length: worldSize }, async (_, rank): Promise<CollectivesOutcome> => {
      const end = { rank, at: 0, exit: { code: 0, signal: null } }
      try {
        return { ...end, value: await runScenario(wrap(group.member(rank)), task) }
      } catch (error) {
        // The other ranks would wait for this one.
        group.fail(() => error as Error)
        const code = error instanceof RankwiseError ? error.code : 'UNEXPECTED'
        return { ...end, error: { code, message: String(error) } }
      }
    })
    return Promise.all(ranks)
  }
}

import { readdir } from 'node:fs/promises'
import { callOptions, directory } from '@rankwise/demo-flux2'
import { RankProcesses } from '@rankwise/fixtures'
import { describe, expect, it } from 'vitest'
import type { PipelineResult, PipelineRun } from './workers/pipeline.ts'

const WORKER = new URL('workers/pipeline.ts', import.meta.url)

/** Long enough that every rank is in the middle of it when one is killed. */
const RUNS: readonly PipelineRun[] = [
  { directory, seed: 42, options: { ...callOptions, prompt: 'a cat on a blue background', numInferenceSteps: 500 } },
]

const sharedMemory = async () => (await readdir('/dev/shm')).sort()

describe('a killed rank', () => {
  it.each([
    ['the first', 0],
    ['the last', 2],
  ])('%s stops the others with its name, and nothing is left behind', async (_which, victim) => {
    const before = await sharedMemory()
    // 3 ranks would need 3 heads; the demo has 8, so the group is 4.
    await using ranks = await RankProcesses.start<readonly PipelineResult[]>(4, WORKER, RUNS)
    await ranks.ready
    const killed = Date.now()
    ranks.kill(victim)
    const outcomes = await ranks.outcomes
    for (const { rank, error, at, exit } of outcomes) {
      if (rank === victim) {
        expect(exit.signal).toBe('SIGKILL')
        continue
      }
      expect(error, `rank ${rank}`).toMatchObject({
        code: 'RANK_LOST',
        message: expect.stringContaining(`rank ${victim}`),
      })
      expect(at - killed, `rank ${rank}`).toBeLessThan(2000)
      expect(exit).toEqual({ code: 0, signal: null })
    }
    expect(await sharedMemory()).toEqual(before)
  })
})

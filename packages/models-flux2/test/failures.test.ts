import { readdir } from 'node:fs/promises'
import { callOptions, directory } from '@rankwise/demo-flux2'
import { onRanks, RankProcesses } from '@rankwise/fixtures'
import { describe, expect, it } from 'vitest'
import type { Disagreement } from './workers/different-requests.ts'
import type { OverlappingResult } from './workers/overlapping-calls.ts'
import type { PipelineResult, PipelineRun } from './workers/pipeline.ts'

const WORKER = new URL('workers/pipeline.ts', import.meta.url)

/** Long enough that every rank is in the middle of it when one is killed. */
const RUNS: readonly PipelineRun[] = [
  { directory, seed: 42, options: { ...callOptions, prompt: 'a cat on a blue background', numInferenceSteps: 500 } },
]

const OVERLAPPING = new URL('workers/overlapping-calls.ts', import.meta.url)
const DISAGREEING = new URL('workers/different-requests.ts', import.meta.url)

describe('ranks that are asked for different pictures', () => {
  it('all say so, and can go on', async () => {
    const asked: Disagreement[] = ['prompt', 'seed', 'size', 'sigmas', 'guidance']
    const ranks = await onRanks<readonly string[]>(2, DISAGREEING, asked)
    expect(ranks).toEqual(ranks.map(() => asked.map(() => 'OPTIONS_DIFFER')))
  })

  it('are told by all when one of them cannot draw, and can go on', async () => {
    const ranks = await onRanks<readonly string[]>(2, DISAGREEING, ['failure', 'prompt'])
    expect(ranks).toEqual([
      ['CALL_FAILED_ELSEWHERE', 'OPTIONS_DIFFER'],
      ['OPTION_INVALID', 'OPTIONS_DIFFER'],
    ])
  })

  it('fail together when one fails between two exchanges and lives on', async () => {
    const asked: Disagreement[] = ['callback']
    const [waiting, failing] = await onRanks<readonly string[]>(2, DISAGREEING, asked)
    expect(failing).toEqual(['CALLBACK'])
    expect(waiting).toEqual([expect.stringMatching(/^(RANK_LOST|ABORTED)$/)])
  })
})

describe('calls that overlap', () => {
  it('draw what they draw one after the other', async () => {
    const prompts = ['a cat on a blue background', 'a rocket on a red background', 'a tree']
    const ranks = await onRanks<OverlappingResult>(2, OVERLAPPING, prompts)
    for (const { alone, together } of ranks) {
      expect(together).toEqual(alone)
      expect(new Set(alone.map((latents) => latents.join())).size).toBe(prompts.length)
    }
  })
})

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

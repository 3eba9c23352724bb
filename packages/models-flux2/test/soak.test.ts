import { Generator } from '@rankwise/diffusion'
import { RankProcesses } from '@rankwise/fixtures'
import { expect, it } from 'vitest'
import type { Ending, Held, Soak, SoakPrompt, SoakResult, SoakStep } from './workers/soak.ts'

const WORKER = new URL('workers/soak.ts', import.meta.url)
const PROMPTS = 30
/** Far more than it takes, for machines that do other work. */
const TIMEOUT_MS = 300_000
const TEXTS = ['a cat on a blue background', 'an emoji of a robot on yellow', 'a rocket, black background'] as const

/**
 * Anonymous memory goes up while the engine compiles what is hot: of 30 prompts, those of the second five and the last
 * five were 3 to 8 MB apart; of 132, the last ones had 12 MB less than the 50th. A leak of 1 MB a prompt adds 20 MB.
 */
const FLAT_BYTES = 14e6

/** The same for every run; when an abort strikes is up to the machine. */
function randomPrompts(endingOf: (random: readonly [number, number, number]) => Ending): readonly SoakPrompt[] {
  const { data } = new Generator().manualSeed(30).rand([PROMPTS, 3])
  return Array.from({ length: PROMPTS }, (_, i) => {
    const random = [...data.subarray(3 * i, 3 * i + 3)] as [number, number, number]
    // The first of every text is drawn, as what later ones are compared with.
    const ending: Ending = i < TEXTS.length ? { kind: 'drawn' } : endingOf(random)
    return { prompt: TEXTS[i % TEXTS.length] as string, ending }
  })
}

function anyEnding([kind, moment, who]: readonly [number, number, number]): Ending {
  if (kind < 0.35) return { kind: 'drawn' }
  if (kind < 0.7) return { kind: 'left', steps: 1 + Math.floor(3 * moment) }
  const ranks = [[0], [1], [0, 1]][Math.floor(3 * who)] as readonly number[]
  return { kind: 'aborted', ranks, moment }
}

/** The median of the anonymous memory of prompts `start` to `end`. */
function median(steps: readonly SoakStep[], start: number, end?: number): number {
  const sorted = steps
    .slice(start, end)
    .map(({ held }) => held.anonymous)
    .sort((a, b) => a - b)
  return sorted[Math.floor(sorted.length / 2)] as number
}

/** All but the memory, which is never the same twice. */
function resources({ anonymous: _, ...counted }: Held): Omit<Held, 'anonymous'> {
  return counted
}

function expectFlatMemory({ steps }: SoakResult): void {
  expect(median(steps, -5) - median(steps, 5, 10), 'growth of the memory').toBeLessThan(FLAT_BYTES)
}

function expectSameResources({ steps }: SoakResult): void {
  for (const { held } of steps) expect(resources(held)).toEqual(resources(steps[0]?.held as Held))
}

async function soak(worldSize: number, argument: Soak) {
  await using ranks = await RankProcesses.start<SoakResult>(worldSize, WORKER, argument)
  const outcomes = await ranks.outcomes
  return { pids: ranks.pids, outcomes, results: await ranks.values() }
}

it(`${PROMPTS} prompts that are cancelled at random leave nothing behind, and the others are drawn as ever`, {
  timeout: TIMEOUT_MS,
}, async () => {
  const prompts = randomPrompts(anyEnding)
  const { pids, outcomes, results } = await soak(2, { prompts, leaks: false })
  const pictures = results[0]?.steps.slice(0, TEXTS.length).map(({ end }) => end) as SoakStep['end'][]
  expect(new Set(pictures.map((end) => JSON.stringify(end))).size).toBe(TEXTS.length)
  const codes: string[] = []
  for (const result of results) {
    for (const [i, { end }] of result.steps.entries()) {
      const { kind } = (prompts[i] as SoakPrompt).ending
      if ('picture' in end) expect(end, `prompt ${i}`).toEqual(pictures[i % TEXTS.length])
      else codes.push(end.code)
      // An abort may come when the picture is drawn already.
      if (kind !== 'aborted') expect('picture' in end ? 'drawn' : end.code, `prompt ${i}`).toBe(kind)
    }
    expectFlatMemory(result)
    expectSameResources(result)
    expect(resources(result.after)).toEqual(resources(result.before))
  }
  expect(codes).toContain('ABORTED')
  const cancelled = new Set(['left', 'ABORTED', 'CALL_FAILED_ELSEWHERE', 'RANK_LOST'])
  expect(codes.filter((code) => !cancelled.has(code))).toEqual([])
  for (const { exit } of outcomes) expect(exit).toEqual({ code: 0, signal: null })
  for (const pid of pids) expect(() => process.kill(pid, 0)).toThrow('ESRCH')
})

it('a megabyte or a descriptor that every prompt leaves behind is noticed', { timeout: TIMEOUT_MS }, async () => {
  // Each rank is judged by itself: one is enough, and takes half the time.
  const { results } = await soak(1, { prompts: randomPrompts(() => ({ kind: 'left', steps: 1 })), leaks: true })
  for (const result of results) {
    expect(() => expectFlatMemory(result)).toThrow('growth of the memory')
    expect(() => expectSameResources(result)).toThrow('descriptors')
  }
})

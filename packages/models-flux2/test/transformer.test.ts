import { expectClose, type GoldenTensors, loadGolden, onRanks } from '@rankwise/fixtures'
import { beforeAll, describe, expect, it } from 'vitest'
import type { Taps } from './workers/tapped-transformer.ts'

const WORKER = new URL('workers/tapped-transformer.ts', import.meta.url)
const BLOCKS = ['double0.0', 'double0.1', 'double1.0', 'double1.1', 'single0', 'single1', 'single2'].map(
  (b) => `mid.${b}`,
)

// The goldens of klein have no blocks; those of dev have all.
const CASES = [
  { checkpoint: 'flux2-klein-tiny', name: 'flux2-klein-tiny.a', compared: ['mid.temb', 'out'] },
  { checkpoint: 'flux2-klein-tiny', name: 'flux2-klein-tiny.b', compared: ['mid.temb', 'out'] },
  { checkpoint: 'flux2-tiny', name: 'flux2-tiny.a', compared: ['mid.temb', ...BLOCKS, 'out'] },
  { checkpoint: 'flux2-tiny', name: 'flux2-tiny.b', compared: ['mid.temb', ...BLOCKS, 'out'] },
  { checkpoint: 'flux2-tiny-bf16', name: 'flux2-tiny-bf16.a', compared: ['out'] },
].map((testCase) => ({ ...testCase, golden: `transformer/${testCase.name}.f32.safetensors` }))

/** diffusers itself differs by up to 5.7e-6 of 5 between one rank and several. */
function expectGolden(taps: Taps | undefined, compared: readonly string[], golden: GoldenTensors): void {
  for (const name of compared) expectClose(taps?.[name] as Float32Array, golden.get(name), { relativeRms: 2e-5 })
}

describe.each([1, 2, 4])('at degree %i', (worldSize) => {
  let ranks: readonly (readonly Taps[])[]

  beforeAll(async () => {
    ranks = await onRanks(worldSize, WORKER, CASES)
  })

  it.each(CASES.map((testCase, index) => ({ ...testCase, index })))('$name agrees with diffusers', async (testCase) => {
    expectGolden(ranks[0]?.[testCase.index], testCase.compared, await loadGolden(testCase.golden))
  })

  it('is bitwise the same on all ranks', () => {
    expect(ranks).toHaveLength(worldSize)
    for (const rank of ranks) expect(rank).toEqual(ranks[0])
  })

  it('would notice a block of another input', async () => {
    const other = await loadGolden(CASES[3]?.golden ?? '')
    const taps = { ...ranks[0]?.[3], 'mid.double0.0': other.get('mid.double1.0').data }
    expect(() => expectGolden(taps, BLOCKS, other)).toThrow(/relative/i)
  })
})

import { expectClose, loadGolden, onRanks } from '@rankwise/fixtures'
import { describe, expect, it } from 'vitest'
import type { SplitModelResult } from './workers/split-model.ts'

const WORKER = new URL('workers/split-model.ts', import.meta.url)
const GOLDEN = 'transformer/flux2-klein-tiny.a.f32.safetensors'

describe.each([2, 4])('at degree %i', (worldSize) => {
  it('a model that is split in memory computes what one that was loaded split computes', async () => {
    const ranks = await onRanks<SplitModelResult>(worldSize, WORKER, GOLDEN)
    const out = (await loadGolden(GOLDEN)).get('out')
    for (const { sharded, split, memory, reports } of ranks) {
      expect(split).toEqual(sharded)
      expectClose(split, out.data as Float32Array, { relativeRms: 2e-5 })
      expect(reports[0].localBytes).toBe(reports[1].localBytes)
      expect(reports[0].mappedBytes).toBe(memory[1].mappedBytes)
      const [whole, after] = memory.map(({ weightBytes, mappedBytes }) => weightBytes + mappedBytes) as [number, number]
      // 23 % of this tiny model is replicated; the rest is shared out, and nothing of the whole weights stays.
      expect(after / whole).toBeCloseTo(0.2324 + (1 - 0.2324) / worldSize, 3)
    }
  })
})

import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { expectClose, loadGolden, onRanks } from '@rankwise/fixtures'
import { expect, it, onTestFinished } from 'vitest'
import type { OverlappingWork } from './workers/overlapping-work.ts'

const GOLDEN = 'transformer/flux2-klein-tiny.a.f32.safetensors'

it('runs, loads and saves of one group that are begun at once follow each other', async () => {
  const folder = await mkdtemp(join(tmpdir(), 'rankwise-'))
  onTestFinished(() => rm(folder, { recursive: true, force: true }))
  const work: OverlappingWork = { golden: GOLDEN, folder }
  const ranks = await onRanks<readonly Float32Array[]>(2, new URL('workers/overlapping-work.ts', import.meta.url), work)
  const out = (await loadGolden(GOLDEN)).get('out')
  for (const outputs of ranks) {
    expect(outputs).toHaveLength(3)
    for (const output of outputs) expectClose(output, out.data as Float32Array, { relativeRms: 2e-5 })
  }
})

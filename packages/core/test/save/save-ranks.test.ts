import { readdir } from 'node:fs/promises'
import { join } from 'node:path'
import { expect, test } from 'vitest'
import { onRanks, RankProcesses } from '../../../conformance/src/ranks/rank-processes.ts'
import { REPLICATED, shardSlices } from '../../src/placement.ts'
import { ShardedCheckpoint } from '../../src/save/index.ts'
import { temporaryFolder } from '../checkpoint/files.ts'
import type { SaveOrder } from '../workers/save-shards.ts'
import { sha256, shardGoldens, tinyModel } from './flux2-tiny.ts'
import { snapshot } from './folders.ts'

// Ranks that are processes, with the collectives that they have in earnest.

const WORKER = new URL('../workers/save-shards.ts', import.meta.url)

test('four ranks save what two then load', async () => {
  const folder = join(await temporaryFolder(), 'new')
  await onRanks(4, WORKER, { directory: folder } satisfies SaveOrder)
  expect(await readdir(folder)).toHaveLength(6)
  const { placements } = await tinyModel('flux2-klein-tiny')
  await using weights = await ShardedCheckpoint.open(folder)
  expect(weights.tpDegree).toBe(4)
  for (const [rank, parameters] of shardGoldens('flux2-klein-tiny').tp2.entries()) {
    for (const [name, golden] of Object.entries(parameters)) {
      const slices = shardSlices(placements.get(name)?.placement ?? REPLICATED, rank, 2)
      expect(sha256(await weights.source(name, slices).read()), name).toBe(golden.sha256)
    }
  }
})

test.each([
  ['killed', ['RANK_LOST', undefined, 'RANK_LOST', 'RANK_LOST']],
  ['aborted', ['ABORTED', 'ABORTED', 'ABORTED', 'ABORTED']],
] as const)('when one of four ranks is %s, none saves and the folder is as it was', async (misfortune, codes) => {
  const folder = await temporaryFolder()
  await onRanks(2, WORKER, { directory: folder } satisfies SaveOrder)
  const before = await snapshot(folder)
  await using ranks = await RankProcesses.start(4, WORKER, { directory: folder, misfortune } satisfies SaveOrder)
  const outcomes = await ranks.outcomes
  expect(outcomes.map(({ error }) => error?.code)).toEqual(codes)
  expect(await snapshot(folder)).toEqual(before)
})

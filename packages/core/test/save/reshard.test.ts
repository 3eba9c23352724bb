import { open } from 'node:fs/promises'
import fc from 'fast-check'
import { afterEach, expect, test, vi } from 'vitest'
import type { ShardRun } from '../../src/checkpoint/shard-layout.ts'
import type { ShardSource } from '../../src/checkpoint/shard-source.ts'
import { viewAs } from '../../src/dtype.ts'
import { type ShardSlices, shardSlices } from '../../src/placement.ts'
import type { GatherPlan } from '../../src/save/gather-plan.ts'
import type { ShardedCheckpoint } from '../../src/save/index.ts'
import { byteSizeOf, Tensor } from '../../src/tensor.ts'
import { patternBytes, temporaryFolder } from '../checkpoint/files.ts'
import { skipSync } from './folders.ts'
import { type GatherCase, gatherCase, partBytes, partShape } from './gather-cases.ts'
import { MemoryRanks } from './memory-ranks.ts'

/** More than a part has that is contiguous. */
const RANGES = 10

const PLAN = '../../src/save/gather-plan.ts'

afterEach(() => {
  vi.doUnmock(PLAN)
  vi.resetModules()
})

test('any part of a tensor saved at any degree equals slicing the whole, and no other byte is read', async () => {
  const seen = await expectResharded(150)
  // Both kinds have to be among the parts, or the property says little.
  expect(seen.mapped).toBeGreaterThan(30)
  expect(seen.gathered).toBeGreaterThan(30)
  expect(seen.mostRanges).toBeLessThan(RANGES)
})

/** Each moves, drops or repeats bytes of the plan and leaves its sizes as they are. */
const mutants: [what: string, mutate: (run: ShardRun, i: number) => ShardRun | undefined][] = [
  ['bytes are taken one too late', (run) => ({ ...run, offset: run.offset + 1 })],
  ['bytes go one too far back', (run) => ({ ...run, target: Math.max(0, run.target - 1) })],
  ['runs are a byte short', (run) => ({ ...run, length: run.length - 1 })],
  ['the second run is dropped', (run, i) => (i === 1 ? undefined : run)],
  ['the second run is taken from where the first is', (run, i) => (i === 1 ? { ...run, offset: 0 } : run)],
]

test.each(mutants)('sees that %s', async (_, mutate) => {
  await mutatePlan((plan) => ({
    ...plan,
    *runs() {
      let i = 0
      for (const run of plan.runs()) {
        const mutated = mutate(run, i++)
        if (mutated !== undefined) yield mutated
      }
    },
  }))
  await expect(expectResharded(150)).rejects.toThrow(/Property failed/)
})

test('sees that strided parts are taken for contiguous', async () => {
  await mutatePlan((plan) => ({ ...plan, isContiguous: true }))
  // A few ranges per row are right, if many: only their number tells. 15 to 180 in 16 runs.
  expect((await expectResharded(150)).mostRanges).toBeGreaterThanOrEqual(RANGES)
})

test('sees that a rank takes the piece of another', async () => {
  await mutatePlan(
    (plan) => plan,
    (rank, degree) => (rank + 1) % degree,
  )
  await expect(expectResharded(150)).rejects.toThrow(/Property failed/)
})

async function mutatePlan(
  mutate: (plan: GatherPlan) => GatherPlan,
  mutateRank: (rank: number, degree: number) => number = (rank) => rank,
): Promise<void> {
  vi.doMock(PLAN, async (importOriginal) => {
    const original = await importOriginal<typeof import('../../src/save/gather-plan.ts')>()
    return {
      ...original,
      gatherPlan(options: Parameters<typeof original.gatherPlan>[0]) {
        const plan = original.gatherPlan({ ...options, rank: mutateRank(options.rank, options.savedDegree) })
        return plan && mutate(plan)
      },
    }
  })
  vi.resetModules()
}

interface Seen {
  /** Parts that are ranges of one file, and not all of it. */
  mapped: number
  /** Parts that have to be read. */
  gathered: number
  /** Most ranges of a mapped part. */
  mostRanges: number
}

async function expectResharded(numRuns: number): Promise<Seen> {
  const { saveShards, ShardedCheckpoint } = await import('../../src/save/index.ts')
  await skipSync()
  const folder = await temporaryFolder()
  const seen: Seen = { mapped: 0, gathered: 0, mostRanges: 0 }
  await fc.assert(
    fc.asyncProperty(gatherCase, async (reshard) => {
      const bytes = patternBytes(byteSizeOf(reshard.shape, reshard.dtype))
      await save(saveShards, folder, reshard, bytes)
      await using checkpoint = await ShardedCheckpoint.open(folder)
      for (const slices of reshard.wanted) {
        const source = checkpoint.source('t', slices)
        const expected = partBytes(bytes, reshard, slices)
        await expectPart(checkpoint, source, reshard, expected)
        count(seen, source, bytes)
      }
    }),
    { numRuns },
  )
  return seen
}

async function save(
  saveShards: typeof import('../../src/save/index.ts').saveShards,
  folder: string,
  reshard: GatherCase,
  bytes: Uint8Array,
): Promise<void> {
  const { dtype, shape, placement, savedDegree } = reshard
  const results = await new MemoryRanks(savedDegree).run((collectives, rank) =>
    saveShards(folder, {
      component: 'test',
      config: '{}',
      weightsName: 'diffusion_pytorch_model',
      tensors: new Map([['t', { dtype, shape }]]),
      placements: new Map([['t', { placement, splitInput: false }]]),
      collectives,
      read: async () => {
        const slices: ShardSlices | undefined = shardSlices(placement, rank, savedDegree)
        const local = partBytes(bytes, reshard, slices).slice()
        return new Tensor(dtype, partShape(reshard, slices), viewAs(dtype, local))
      },
    }),
  )
  for (const result of results) if (result.status === 'rejected') throw result.reason
}

async function expectPart(
  { stats }: ShardedCheckpoint,
  source: ShardSource,
  reshard: GatherCase,
  expected: Uint8Array,
): Promise<void> {
  const before = stats.bytesRead
  const tensor = await source.read()
  const shape = partShape(reshard, source.slices)
  expect(tensor).toMatchObject({ dtype: reshard.dtype, shape })
  expect(source).toMatchObject({ dtype: reshard.dtype, shape, fullShape: reshard.shape, byteLength: expected.length })
  expect(Buffer.from(tensor.data.buffer).equals(expected)).toBe(true)
  const bytesRead = stats.bytesRead - before
  expect(bytesRead).toBeGreaterThanOrEqual(expected.length)
  // While the disk is slow, a byte of every page in between is read as well.
  expect(bytesRead).toBeLessThanOrEqual(expected.length + byteSizeOf(reshard.shape, reshard.dtype) / 4096)
  const ranges = source.ranges()
  if (ranges !== undefined) expect((await readRanges(source.file, ranges)).equals(expected)).toBe(true)
}

function count(seen: Seen, source: ShardSource, bytes: Uint8Array): void {
  const ranges = source.ranges()
  if (ranges === undefined) seen.gathered++
  else if (source.byteLength > 0 && source.byteLength < bytes.length) seen.mapped++
  seen.mostRanges = Math.max(seen.mostRanges, ranges?.length ?? 0)
}

async function readRanges(path: string, ranges: readonly { offset: number; length: number }[]): Promise<Buffer> {
  if (ranges.length === 0) return Buffer.alloc(0)
  await using file = await open(path)
  const parts: Buffer[] = []
  for (const { offset, length } of ranges) {
    const { buffer } = await file.read(Buffer.alloc(length), 0, length, offset)
    parts.push(buffer)
  }
  return Buffer.concat(parts)
}

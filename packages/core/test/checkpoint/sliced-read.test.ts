import { writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import fc from 'fast-check'
import { afterEach, expect, test, vi } from 'vitest'
import type { ShardRun } from '../../src/checkpoint/shard-layout.ts'
import { byteSizeOf } from '../../src/tensor.ts'
import { patternBytes, rawFile, temporaryFolder } from './files.ts'
import { FORMAT_NAMES, type SliceCase, sliceCase, slicedBytes } from './slices.ts'

const LAYOUT = '../../src/checkpoint/shard-layout.ts'

afterEach(() => {
  vi.doUnmock(LAYOUT)
  vi.resetModules()
})

test('a sliced read equals slicing the whole tensor, and reads and allocates nothing else', async () => {
  await expectSlicedReads(400)
})

/** Each moves, drops or repeats bytes and leaves the size of the result as it is. */
const mutants: [what: string, mutate: (run: ShardRun) => ShardRun][] = [
  ['runs start one byte late', (run) => ({ ...run, offset: run.offset + 1 })],
  ['runs start one byte early', (run) => ({ ...run, offset: Math.max(0, run.offset - 1) })],
  ['runs are one byte short', (run) => ({ ...run, length: run.length - 1 })],
  ['runs go one byte too far back', (run) => ({ ...run, target: Math.max(0, run.target - 1) })],
  ['runs of later rows are those of the first', (run) => ({ ...run, offset: run.offset % 24 })],
]

test.each(mutants)('sees that %s', async (_, mutate) => {
  vi.doMock(LAYOUT, async (importOriginal) => {
    const original = await importOriginal<typeof import('../../src/checkpoint/shard-layout.ts')>()
    return {
      ...original,
      *shardRuns(...args: Parameters<typeof original.shardRuns>) {
        for (const run of original.shardRuns(...args)) yield mutate(run)
      },
    }
  })
  vi.resetModules()
  await expect(expectSlicedReads(400)).rejects.toThrow(/Property failed/)
})

test('sees rows that are one element too long', async () => {
  vi.doMock(LAYOUT, async (importOriginal) => {
    const original = await importOriginal<typeof import('../../src/checkpoint/shard-layout.ts')>()
    return {
      ...original,
      shardLayout(...args: Parameters<typeof original.shardLayout>) {
        const layout = original.shardLayout(...args)
        return layout.rowCount > 1 ? { ...layout, rowBytes: layout.rowBytes + args[1] } : layout
      },
    }
  })
  vi.resetModules()
  await expect(expectSlicedReads(400)).rejects.toThrow(/Property failed/)
})

async function expectSlicedReads(numRuns: number): Promise<void> {
  const { SafetensorsFile } = await import('../../src/checkpoint/safetensors-file.ts')
  const path = join(await temporaryFolder(), 'weights.safetensors')
  let strided = 0
  await fc.assert(
    fc.asyncProperty(sliceCase, async (slice) => {
      const { dtype, shape, slices } = slice
      const fullBytes = byteSizeOf(shape, dtype)
      const data = patternBytes(slice.bytesBefore + fullBytes + 1)
      await writeFile(path, fileOf(slice, data))
      await using file = await SafetensorsFile.open(path)

      const tensor = await file.read('t', slices)
      const expected = slicedBytes(data.subarray(slice.bytesBefore, slice.bytesBefore + fullBytes), slice)
      expect(tensor.dtype).toBe(dtype)
      expect(tensor.shape).toEqual(shape.with(slices.dim, lengthOf(slice)))
      expect(new Uint8Array(tensor.data.buffer as ArrayBuffer)).toEqual(expected)

      expect(file.stats.bytesRead).toBe(expected.length)
      expect(file.stats.largestBuffer).toBe(expected.length)
      if (slices.dim > 0 && expected.length < fullBytes) strided++
    }),
    { numRuns },
  )
  // The property must have met some parts with gaps.
  expect(strided).toBeGreaterThan(numRuns / 4)
}

/** A header of odd length, with the tensor between two others. */
function fileOf({ dtype, shape, bytesBefore }: SliceCase, data: Uint8Array): Buffer {
  const end = data.length - 1
  const header = JSON.stringify({
    before: { dtype: 'U8', shape: [bytesBefore], data_offsets: [0, bytesBefore] },
    t: { dtype: FORMAT_NAMES[dtype], shape, data_offsets: [bytesBefore, end] },
    after: { dtype: 'U8', shape: [1], data_offsets: [end, end + 1] },
  })
  return rawFile(header.length % 2 === 0 ? `${header} ` : header, data)
}

function lengthOf({ slices }: SliceCase): number {
  return slices.ranges.reduce((sum, [start, end]) => sum + end - start, 0)
}

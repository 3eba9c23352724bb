import { writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import fc from 'fast-check'
import { afterEach, expect, test, vi } from 'vitest'
import type { PlannedRead } from '../../src/checkpoint/shard-layout.ts'
import { byteSizeOf } from '../../src/tensor.ts'
import { patternBytes, rawFile, temporaryFolder } from './files.ts'
import { FORMAT_NAMES, type SliceCase, sliceCase, slicedBytes } from './slices.ts'

const LAYOUT = '../../src/checkpoint/shard-layout.ts'

afterEach(() => {
  vi.doUnmock(LAYOUT)
  vi.resetModules()
})

test('a sliced read equals slicing the whole tensor, in buffers smaller than the tensor', async () => {
  await expectSlicedReads(400)
})

/** Each moves, drops or repeats bytes and leaves the size of the result as it is. */
const mutants: [what: string, mutate: (read: PlannedRead) => PlannedRead][] = [
  ['reads start one byte late', (read) => ({ ...read, offset: read.offset + 1 })],
  ['reads start one byte early', (read) => ({ ...read, offset: Math.max(0, read.offset - 1) })],
  ['reads are one byte short', (read) => ({ ...read, length: read.length - 1 })],
  [
    'parts of a window are off by one',
    (read) => ({ ...read, runs: read.runs.map((run, i) => ({ ...run, offset: run.offset + Math.min(i, 1) })) }),
  ],
  [
    'the last part of a window is dropped',
    (read) => (read.runs.length > 1 ? { ...read, runs: read.runs.slice(0, -1) } : read),
  ],
  ['windows go one byte too far back', (read) => ({ ...read, target: Math.max(0, read.target - 1) })],
]

test.each(mutants)('sees that %s', async (_, mutate) => {
  vi.doMock(LAYOUT, async (importOriginal) => {
    const original = await importOriginal<typeof import('../../src/checkpoint/shard-layout.ts')>()
    return {
      ...original,
      *planReads(...args: Parameters<typeof original.planReads>) {
        for (const read of original.planReads(...args)) yield mutate(read)
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
  let windows = 0
  await fc.assert(
    fc.asyncProperty(sliceCase, async (slice) => {
      const { dtype, shape, slices, windowBytes } = slice
      const fullBytes = byteSizeOf(shape, dtype)
      const data = patternBytes(slice.bytesBefore + fullBytes + 1)
      await writeFile(path, fileOf(slice, data))
      await using file = await SafetensorsFile.open(path, { windowBytes })

      const tensor = await file.read('t', slices)
      const expected = slicedBytes(data.subarray(slice.bytesBefore, slice.bytesBefore + fullBytes), slice)
      expect(tensor.dtype).toBe(dtype)
      expect(tensor.shape).toEqual(shape.with(slices.dim, lengthOf(slice)))
      expect(new Uint8Array(tensor.data.buffer as ArrayBuffer)).toEqual(expected)

      if (expected.length < fullBytes) expect(file.stats.largestBuffer).toBeLessThan(fullBytes)
      expect(file.stats.largestBuffer).toBeLessThanOrEqual(expected.length)
      expect(file.stats.bytesRead).toBeLessThanOrEqual(fullBytes)
      if (file.stats.bytesRead > expected.length) windows++
    }),
    { numRuns },
  )
  // Gaps are read only by windows: the property must have met some.
  expect(windows).toBeGreaterThan(numRuns / 20)
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

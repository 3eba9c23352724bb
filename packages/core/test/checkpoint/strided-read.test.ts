import { randomBytes } from 'node:crypto'
import { truncate, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { beforeEach, expect, test, vi } from 'vitest'
import { SafetensorsFile } from '../../src/checkpoint/safetensors-file.ts'
import type { ShardSlices } from '../../src/placement.ts'
import type { Tensor } from '../../src/tensor.ts'
import { expectCode, rawFile, temporaryFolder } from './files.ts'

/** What the disk is like, and what was asked of it. */
const disk = vi.hoisted(() => ({
  /** Milliseconds that a call takes beside its reading. */
  delay: 0,
  calls: [] as { readonly offset: number; readonly length: number }[],
}))

vi.mock('node:fs', async (importOriginal) => {
  const original = await importOriginal<typeof import('node:fs')>()
  return {
    ...original,
    readSync(file: number, target: Uint8Array, at: number, length: number, offset: number) {
      disk.calls.push({ offset, length })
      const end = performance.now() + disk.delay
      while (performance.now() < end);
      return original.readSync(file, target, at, length, offset)
    },
  }
})

beforeEach(() => {
  disk.delay = 0
  disk.calls.length = 0
})

const PAGE = 4096

/** A file of one tensor of bytes, whose data starts at a page. */
async function fileOf(rows: number, columns: number): Promise<{ readonly path: string; readonly data: Uint8Array }> {
  const path = join(await temporaryFolder(), 't.safetensors')
  const data = randomBytes(rows * columns)
  const header = JSON.stringify({ t: { dtype: 'U8', shape: [rows, columns], data_offsets: [0, data.length] } })
  await writeFile(path, rawFile(header.padEnd(PAGE - 8), data))
  return { path, data }
}

/** Compared as a whole: to compare megabytes element by element takes seconds. */
function expectColumns(bytes: Tensor['data'], data: Uint8Array, columns: number, [start, end]: [number, number]): void {
  const rows = Array.from({ length: data.length / columns }, (_, row) => row * columns)
  const expected = Buffer.concat(rows.map((row) => data.subarray(row + start, row + end)))
  expect(Buffer.compare(bytes as Uint8Array, expected)).toBe(0)
}

const slice = (start: number, end: number): ShardSlices => ({ dim: 1, ranges: [[start, end]] })

test('reads the runs, and nothing else, while the disk is fast', async () => {
  const { path, data } = await fileOf(200, 6 * PAGE)
  await using file = await SafetensorsFile.open(path)
  // Whatever else this machine does: a disk that seems slow is another test.
  vi.spyOn(performance, 'now').mockReturnValue(0)
  const { data: bytes } = await file.read('t', slice(PAGE + 3, 2 * PAGE + 5)).finally(() => vi.restoreAllMocks())
  expectColumns(bytes, data, 6 * PAGE, [PAGE + 3, 2 * PAGE + 5])
  expect(file.stats.bytesRead).toBe(bytes.byteLength)
  expect(disk.calls).toHaveLength(200)
})

test('touches every page between the runs while the disk is slow', async () => {
  disk.delay = 0.1
  const { path, data } = await fileOf(200, 6 * PAGE)
  await using file = await SafetensorsFile.open(path)
  const { data: bytes } = await file.read('t', slice(PAGE + 3, 2 * PAGE + 5))
  expectColumns(bytes, data, 6 * PAGE, [PAGE + 3, 2 * PAGE + 5])

  const touched = disk.calls.filter(({ length }) => length === 1)
  expect(file.stats.bytesRead).toBe(bytes.byteLength + touched.length)
  expect(file.stats.bytesRead).toBeLessThan(bytes.byteLength * 1.02)
  // The first 16 calls show that it is slow; from then on, no page is left out and none is read twice.
  const later = disk.calls.slice(16).map(({ offset, length }) => [offset, offset + length - 1].map((at) => at / PAGE))
  const pages = later.flatMap(([first = 0, last = 0]) => [...new Set([Math.floor(first), Math.floor(last)])])
  expect(touched.length).toBe(4 * (200 - 16))
  expect(pages).toEqual(Array.from({ length: pages.length }, (_, i) => (pages[0] as number) + i))
})

test('jumps over wide gaps, however slow the disk is', async () => {
  disk.delay = 0.1
  const { path, data } = await fileOf(100, 40 * PAGE)
  await using file = await SafetensorsFile.open(path)
  const { data: bytes } = await file.read('t', slice(5, 1000))
  expectColumns(bytes, data, 40 * PAGE, [5, 1000])
  expect(file.stats.bytesRead).toBe(bytes.byteLength)
  expect(disk.calls).toHaveLength(100)
})

test('leaves long runs to the thread pool', async () => {
  const { path, data } = await fileOf(20, 200_000)
  await using file = await SafetensorsFile.open(path)
  const { data: bytes } = await file.read('t', slice(1, 100_001))
  expectColumns(bytes, data, 200_000, [1, 100_001])
  expect(file.stats.bytesRead).toBe(2_000_000)
  expect(disk.calls).toEqual([])
})

test('gives other work its turn', async () => {
  disk.delay = 0.1
  const { path } = await fileOf(500, 64)
  await using file = await SafetensorsFile.open(path)
  let turns = 0
  const other = setInterval(() => turns++, 0)
  await file.read('t', slice(0, 32))
  clearInterval(other)
  // 500 calls of 0.1 ms are 50 turns of 1 ms; a busy machine may take some of them.
  expect(turns).toBeGreaterThan(5)
})

test('stops between two runs when it is aborted', async () => {
  disk.delay = 0.1
  const { path } = await fileOf(5000, 64)
  await using file = await SafetensorsFile.open(path)
  await expectCode(() => file.read('t', slice(0, 32), { signal: AbortSignal.abort() }), 'ABORTED', path, '"t"')
  expect(disk.calls).toEqual([])

  const controller = new AbortController()
  setTimeout(() => controller.abort(), 5)
  await expectCode(() => file.read('t', slice(0, 32), { signal: controller.signal }), 'ABORTED', path, '"t"')
  expect(disk.calls.length).toBeGreaterThan(0)
  expect(disk.calls.length).toBeLessThan(5000)
  expect(file.stats.tensorsRead).toBe(0)
})

test('notices a file that became shorter', async () => {
  const { path } = await fileOf(100, 64)
  await using file = await SafetensorsFile.open(path)
  const end = PAGE + 50 * 64 + 10
  await truncate(path, end)
  await expectCode(() => file.read('t', slice(0, 32)), 'SAFETENSORS_TRUNCATED', path, '"t"', end, end - 10 + 32)
  expect(file.stats).toMatchObject({ bytesRead: 50 * 32, tensorsRead: 0 })
})

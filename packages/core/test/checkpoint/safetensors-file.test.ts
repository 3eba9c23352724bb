import { execFileSync } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import { mkdir, open, truncate, writeFile } from 'node:fs/promises'
import { join, relative } from 'node:path'
import { describe, expect, test } from 'vitest'
import { readSafetensors, SafetensorsFile } from '../../src/checkpoint/safetensors-file.ts'
import { expectCode, openFiles, patternBytes, rawFile, temporaryFolder, writeRaw } from './files.ts'

const GIB = 2 ** 30
const MIB = 2 ** 20

function u8(shape: readonly number[], begin: number, end: number) {
  return { dtype: 'U8', shape, data_offsets: [begin, end] }
}

/** A file of `dataBytes` zeros that take no room on the disk, but for the `written` ones. */
async function sparseFile(
  path: string,
  header: object,
  dataBytes: number,
  written: Readonly<Record<number, Uint8Array>>,
) {
  const start = rawFile(header)
  await writeFile(path, start)
  await truncate(path, start.length + dataBytes)
  const handle = await open(path, 'r+')
  for (const [offset, bytes] of Object.entries(written)) {
    await handle.write(bytes, 0, bytes.length, start.length + Number(offset))
  }
  await handle.close()
}

describe('reading', () => {
  test('gives elements of the stored dtype from any offset', async () => {
    const data = Buffer.alloc(15)
    data.writeFloatLE(1.5, 1)
    data.writeBigInt64LE(-7n, 5)
    data.writeUInt16LE(0x3fc0, 13)
    const folder = await temporaryFolder()
    const header = {
      flag: { dtype: 'BOOL', shape: [], data_offsets: [0, 1] },
      f: { dtype: 'F32', shape: [1], data_offsets: [1, 5] },
      i: { dtype: 'I64', shape: [1, 1], data_offsets: [5, 13] },
      b: { dtype: 'BF16', shape: [1], data_offsets: [13, 15] },
    }
    const tensors = await readSafetensors(await writeRaw(folder, 't.safetensors', header, data))
    expect([...tensors.keys()]).toEqual(['flag', 'f', 'i', 'b'])
    expect(tensors.get('flag')).toMatchObject({ dtype: 'bool', shape: [], data: Uint8Array.of(0) })
    expect(tensors.get('f')).toMatchObject({ dtype: 'float32', shape: [1], data: Float32Array.of(1.5) })
    expect(tensors.get('i')).toMatchObject({ dtype: 'int64', shape: [1, 1], data: BigInt64Array.of(-7n) })
    expect(tensors.get('b')).toMatchObject({ dtype: 'bfloat16', shape: [1], data: Uint16Array.of(0x3fc0) })
  })

  test('reads several tensors at once from one handle', async () => {
    const data = patternBytes(40_000)
    const header = { a: u8([100, 200], 0, 20_000), b: u8([200, 100], 20_000, 40_000) }
    const path = await writeRaw(await temporaryFolder(), 't.safetensors', header, data)
    await using file = await SafetensorsFile.open(path)
    const slices = { dim: 1, ranges: [[10, 20]] } as const
    const [a, b, part] = await Promise.all([file.read('a'), file.read('b'), file.read('a', slices)])
    expect(Buffer.concat([a.data as Uint8Array, b.data as Uint8Array])).toEqual(Buffer.from(data))
    expect((part.data as Uint8Array).subarray(10, 20)).toEqual(data.subarray(210, 220))
    expect(file.stats.tensorsRead).toBe(3)
  })

  test('reads a tensor of more bytes than one call may take', async () => {
    const data = randomBytes(33 * MIB + 5)
    const path = await writeRaw(
      await temporaryFolder(),
      't.safetensors',
      { t: u8([data.length], 0, data.length) },
      data,
    )
    const tensor = (await readSafetensors(path)).get('t')
    expect(Buffer.compare(tensor?.data as Uint8Array, data)).toBe(0)
  })

  test('counts bytes and buffers', async () => {
    const path = await writeRaw(
      await temporaryFolder(),
      't.safetensors',
      { t: u8([8, 100], 0, 800) },
      patternBytes(800),
    )
    await using file = await SafetensorsFile.open(path)
    expect(file.stats).toMatchObject({ bytesRead: 0, largestBuffer: 0, tensorsRead: 0 })
    expect(file.stats.headerBytes).toBeGreaterThan(50)
    await file.read('t', { dim: 1, ranges: [[0, 50]] })
    expect(file.stats).toMatchObject({ bytesRead: 400, largestBuffer: 400, tensorsRead: 1 })
    expect(file.stats.largestBuffers).toEqual(new Map([['t', 400]]))
    await file.read('t')
    expect(file.stats).toMatchObject({ bytesRead: 400 + 800, largestBuffer: 800, tensorsRead: 2 })
  })
})

describe('large files', () => {
  test('reads beyond 4 GiB, and parts of a tensor of more than 2 GiB, in buffers of their own size', async () => {
    const path = join(await temporaryFolder(), 'large.safetensors')
    const marks = [1, 2, 3, 4, 5].map((seed) => patternBytes(16).map((byte) => byte ^ (seed * 41))) as Uint8Array[]
    const [first, second, third, row, last] = marks as [Uint8Array, Uint8Array, Uint8Array, Uint8Array, Uint8Array]
    const rowAt = 3 * GIB + 1500 * MIB
    const header = {
      wide: u8([3, GIB], 0, 3 * GIB),
      tall: u8([2 * MIB, 1024], 3 * GIB, 5 * GIB),
      last: { dtype: 'I32', shape: [4], data_offsets: [5 * GIB, 5 * GIB + 16] },
    }
    const at = 700 * MIB
    const written = { [at]: first, [GIB + at]: second, [2 * GIB + at]: third, [rowAt]: row, [5 * GIB]: last }
    await sparseFile(path, header, 5 * GIB + 16, written)

    await using file = await SafetensorsFile.open(path)
    const columns = await file.read('wide', { dim: 1, ranges: [[at, at + 16]] })
    expect(columns.shape).toEqual([3, 16])
    expect(Buffer.from(columns.data as Uint8Array)).toEqual(Buffer.concat([first, second, third]))

    const index = 1500 * 1024
    const rows = await file.read('tall', { dim: 0, ranges: [[index - 1, index + 2]] })
    expect(rows.shape).toEqual([3, 1024])
    expect((rows.data as Uint8Array).subarray(1024, 1040)).toEqual(row)

    const tensor = await file.read('last')
    expect(new Uint8Array(tensor.data.buffer as ArrayBuffer)).toEqual(last)
    expect(file.stats).toMatchObject({ bytesRead: 48 + 3072 + 16, largestBuffer: 3072 })
  })
})

describe('failing', () => {
  const header = { a: u8([4], 0, 4), q: { dtype: 'F8_E4M3', shape: [2], data_offsets: [4, 6] } }
  const validFile = async () => writeRaw(await temporaryFolder(), 't.safetensors', header, patternBytes(6))

  test('opens nothing that is not a file', async () => {
    const folder = await temporaryFolder()
    await expectCode(() => SafetensorsFile.open(join(folder, 'absent')), 'SAFETENSORS_OPEN', folder, 'ENOENT')
    await mkdir(join(folder, 'folder.safetensors'))
    await expectCode(() => SafetensorsFile.open(join(folder, 'folder.safetensors')), 'SAFETENSORS_OPEN', 'regular file')
    execFileSync('mkfifo', [join(folder, 'fifo')])
    await expectCode(() => SafetensorsFile.open(join(folder, 'fifo')), 'SAFETENSORS_OPEN', 'regular file')
    await writeFile(join(folder, 'empty'), '')
    await expectCode(() => SafetensorsFile.open(join(folder, 'empty')), 'SAFETENSORS_TRUNCATED', 'fileBytes 0')
    expect(await openFiles(folder)).toBe(0)
  })

  test('names the file by its absolute path', async () => {
    const path = await validFile()
    await using file = await SafetensorsFile.open(relative(process.cwd(), path))
    expect(file.path).toBe(path)
    expect(file.tensors.get('a')?.file).toBe(path)
  })

  test('lists a dtype that it cannot read, and refuses to read it', async () => {
    const path = await validFile()
    await using file = await SafetensorsFile.open(path)
    expect(file.tensors.get('q')).toMatchObject({ dtype: 'F8_E4M3', byteLength: 2 })
    await expectCode(() => file.read('q'), 'SAFETENSORS_DTYPE_UNSUPPORTED', path, '"q"', 'F8_E4M3')
    await expectCode(() => file.read('b'), 'TENSOR_NOT_FOUND', path, '"b"')
  })

  test.each([
    ['a dimension it lacks', { dim: 1, ranges: [[0, 1]] }],
    ['a negative dimension', { dim: -1, ranges: [[0, 1]] }],
    ['a range beyond the end', { dim: 0, ranges: [[3, 5]] }],
    ['a negative start', { dim: 0, ranges: [[-1, 2]] }],
    ['a range in reverse', { dim: 0, ranges: [[2, 1]] }],
    ['a fraction', { dim: 0, ranges: [[0, 1.5]] }],
    [
      'ranges out of order',
      {
        dim: 0,
        ranges: [
          [2, 4],
          [0, 2],
        ],
      },
    ],
    [
      'overlapping ranges',
      {
        dim: 0,
        ranges: [
          [0, 2],
          [1, 3],
        ],
      },
    ],
  ] satisfies [string, { dim: number; ranges: [number, number][] }][])('refuses %s', async (_, slices) => {
    const path = await validFile()
    await using file = await SafetensorsFile.open(path)
    await expectCode(() => file.read('a', slices), 'SHARD_SLICES', path, '"a"')
    expect(file.stats).toMatchObject({ bytesRead: 0, largestBuffer: 0 })
  })

  test('notices a file that became shorter', async () => {
    const path = await validFile()
    await using file = await SafetensorsFile.open(path)
    const { byteOffset } = file.tensors.get('a') as { byteOffset: number }
    await truncate(path, byteOffset + 3)
    await expectCode(() => file.read('a'), 'SAFETENSORS_TRUNCATED', path, '"a"', byteOffset + 3, byteOffset + 4)
    expect(file.stats.tensorsRead).toBe(0)
  })

  test('reads nothing after it was closed', async () => {
    const path = await validFile()
    const file = await SafetensorsFile.open(path)
    await file.close()
    await file.close()
    await expectCode(() => file.read('a'), 'SAFETENSORS_CLOSED', path, '"a"')
  })

  test('finishes or refuses reads that a close meets', async () => {
    const shape = [64 * 1024, 64] as const
    const data = new Uint8Array(4 * MIB)
    const path = await writeRaw(await temporaryFolder(), 't.safetensors', { t: u8(shape, 0, data.length) }, data)
    const file = await SafetensorsFile.open(path)
    const reading = expectCode(() => file.read('t', { dim: 1, ranges: [[0, 32]] }), 'SAFETENSORS_CLOSED', '"t"')
    await new Promise((next) => setImmediate(next))
    expect(file.stats.bytesRead).toBeGreaterThan(0)
    await file.close()
    await reading
    expect(file.stats).toMatchObject({ tensorsRead: 0 })
    expect(await openFiles(path)).toBe(0)
  })

  test('stops when it is aborted', async () => {
    const path = join(await temporaryFolder(), 'large.safetensors')
    await sparseFile(path, { t: u8([1024, MIB], 0, GIB) }, GIB, {})
    await using file = await SafetensorsFile.open(path)
    const halves = { dim: 1, ranges: [[0, MIB / 2]] } as const
    const aborted = AbortSignal.abort(new Error('enough'))
    await expectCode(() => file.read('t', halves, { signal: aborted }), 'ABORTED', path, '"t"')
    expect(file.stats.bytesRead).toBe(0)

    const controller = new AbortController()
    const reading = expectCode(() => file.read('t', halves, { signal: controller.signal }), 'ABORTED')
    setTimeout(() => controller.abort(), 5)
    await reading
    expect(file.stats.bytesRead).toBeGreaterThan(0)
    expect(file.stats.bytesRead).toBeLessThan(GIB / 2)
  })
})

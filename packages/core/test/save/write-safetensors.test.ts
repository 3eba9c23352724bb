import { mkdir, readdir, readFile, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import fc from 'fast-check'
import { expect, test } from 'vitest'
import { readSafetensors, SafetensorsFile } from '../../src/checkpoint/safetensors-file.ts'
import { allocate, type DType } from '../../src/dtype.ts'
import { writeSafetensors } from '../../src/save/write-safetensors.ts'
import { sizeOf, Tensor } from '../../src/tensor.ts'
import { expectCode, patternBytes, temporaryFolder } from '../checkpoint/files.ts'
import { FORMAT_NAMES } from '../checkpoint/slices.ts'

function tensorOf(dtype: DType, shape: readonly number[]): Tensor {
  const data = allocate(dtype, sizeOf(shape))
  new Uint8Array(data.buffer as ArrayBuffer).set(patternBytes(data.byteLength))
  return new Tensor(dtype, shape, data)
}

test('writes the layout of the reference implementation', async () => {
  const path = join(await temporaryFolder(), 't.safetensors')
  const tensors = new Map<string, Tensor>([
    ['flag', tensorOf('bool', [])],
    ['b', tensorOf('float32', [1])],
    ['a', tensorOf('float32', [2])],
    ['half', tensorOf('float16', [1])],
    ['brain', tensorOf('bfloat16', [1])],
    ['7', tensorOf('float64', [1])],
  ])
  await writeSafetensors(path, tensors, { format: 'pt' })
  const bytes = await readFile(path)
  const length = Number(bytes.readBigUInt64LE())
  const header = bytes.subarray(8, 8 + length).toString()
  expect(length % 8).toBe(0)
  expect(header.trimEnd()).toBe(
    '{"__metadata__":{"format":"pt"},' +
      '"7":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},' +
      '"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},' +
      '"b":{"dtype":"F32","shape":[1],"data_offsets":[16,20]},' +
      '"brain":{"dtype":"BF16","shape":[1],"data_offsets":[20,22]},' +
      '"half":{"dtype":"F16","shape":[1],"data_offsets":[22,24]},' +
      '"flag":{"dtype":"BOOL","shape":[],"data_offsets":[24,25]}}',
  )
  expect(bytes.length).toBe(8 + length + 25)
})

test('reads back what it wrote', async () => {
  const path = join(await temporaryFolder(), 't.safetensors')
  const tensor = fc
    .tuple(fc.constantFrom(...(Object.keys(FORMAT_NAMES) as DType[])), fc.array(fc.nat({ max: 5 }), { maxLength: 4 }))
    .map(([dtype, shape]) => tensorOf(dtype, shape))
  const name = fc.string({ unit: 'grapheme' }).filter((text) => text !== '__metadata__')
  const metadata = fc.dictionary(
    fc.string().filter((key) => key !== '__proto__'),
    fc.string(),
  )
  await fc.assert(
    fc.asyncProperty(fc.array(fc.tuple(name, tensor), { maxLength: 6 }), metadata, async (entries, strings) => {
      const tensors = new Map(entries)
      await writeSafetensors(path, tensors, strings)
      await using file = await SafetensorsFile.open(path)
      expect(file.metadata).toEqual(new Map(Object.entries(strings)))
      expect(await readSafetensors(path)).toEqual(tensors)
    }),
  )
})

test('writes views of larger buffers', async () => {
  const path = join(await temporaryFolder(), 't.safetensors')
  const view = new Float32Array(Float32Array.of(9, 1, 2, 9).buffer, 4, 2)
  await writeSafetensors(path, new Map([['t', Tensor.float32([2], view)]]))
  expect((await readSafetensors(path)).get('t')?.data).toEqual(Float32Array.of(1, 2))
})

test('refuses names that other readers refuse, before it writes', async () => {
  const folder = await temporaryFolder()
  const path = join(folder, 't.safetensors')
  const tensor = tensorOf('uint8', [1])
  await expectCode(() => writeSafetensors(path, new Map([['__metadata__', tensor]])), 'SAFETENSORS_NAME', path)
  await expectCode(() => writeSafetensors(path, new Map([['\ud800', tensor]])), 'SAFETENSORS_NAME', path)
  await expectCode(() => writeSafetensors(path, new Map(), { a: '\udc00' }), 'SAFETENSORS_NAME', path)
  const long = { note: 'x'.repeat(100_000_000) }
  await expectCode(() => writeSafetensors(path, new Map(), long), 'SAFETENSORS_HEADER_LENGTH', path)
  expect(await readdir(folder)).toEqual([])
})

test('leaves the old file as it is, and nothing else, when it fails', async () => {
  const folder = await temporaryFolder()
  const path = join(folder, 't.safetensors')
  await writeFile(path, 'old')
  const tensors = new Map([['t', tensorOf('uint8', [100])]])
  await expectCode(() => writeSafetensors(path, tensors, {}, { signal: AbortSignal.abort() }), 'ABORTED')
  expect(await readFile(path, 'utf8')).toBe('old')

  await mkdir(join(folder, 'taken', 'full'), { recursive: true })
  await expectCode(() => writeSafetensors(join(folder, 'taken'), tensors), 'SAVE_FAILED', 'taken')
  await expectCode(() => writeSafetensors(join(folder, 'absent', 't'), tensors), 'SAVE_FAILED', 'ENOENT')
  expect((await readdir(folder)).sort()).toEqual(['t.safetensors', 'taken'])

  await writeSafetensors(path, tensors)
  expect((await readSafetensors(path)).size).toBe(1)
  expect((await readdir(folder)).sort()).toEqual(['t.safetensors', 'taken'])
})

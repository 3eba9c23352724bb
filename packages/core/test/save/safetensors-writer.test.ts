import { readdir, readFile, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import fc from 'fast-check'
import { expect, test } from 'vitest'
import { allocate, type DType } from '../../src/dtype.ts'
import { SafetensorsWriter } from '../../src/save/safetensors-writer.ts'
import { writeSafetensors } from '../../src/save/write-safetensors.ts'
import { sizeOf, Tensor } from '../../src/tensor.ts'
import { expectCode, openFiles, patternBytes, temporaryFolder } from '../checkpoint/files.ts'
import { FORMAT_NAMES } from '../checkpoint/slices.ts'
import { skipSync } from './folders.ts'

const TWO = new Map([
  ['b', Tensor.float32([1], [1])],
  ['a', Tensor.float32([1], [2])],
])

const tensor = fc
  .tuple(fc.constantFrom(...(Object.keys(FORMAT_NAMES) as DType[])), fc.array(fc.nat({ max: 5 }), { maxLength: 4 }))
  .map(([dtype, shape]) => {
    const data = allocate(dtype, sizeOf(shape))
    new Uint8Array(data.buffer as ArrayBuffer).set(patternBytes(data.byteLength))
    return new Tensor(dtype, shape, data)
  })

test('writes what writeSafetensors writes from memory', async () => {
  await skipSync()
  const folder = await temporaryFolder()
  let count = 0
  await fc.assert(
    fc.asyncProperty(fc.dictionary(fc.string({ unit: 'grapheme' }), tensor, { maxKeys: 6 }), async (content) => {
      const tensors = new Map(Object.entries(content))
      const [streamed, whole] = [join(folder, `streamed${count}`), join(folder, `whole${count++}`)]
      await using writer = await SafetensorsWriter.create(streamed, tensors, { metadata: { format: 'pt' } })
      for (const name of writer.names) await writer.write(name, tensors.get(name) as Tensor)
      await writer.finish()
      await writeSafetensors(whole, tensors, { format: 'pt' })
      expect((await readFile(streamed)).equals(await readFile(whole))).toBe(true)
    }),
    { numRuns: 50 },
  )
})

test('refuses tensors in another order, twice, too many or too few', async () => {
  const folder = await temporaryFolder()
  await using writer = await SafetensorsWriter.create(join(folder, 'w'), TWO)
  const [a, b] = [TWO.get('a') as Tensor, TWO.get('b') as Tensor]
  expect(writer.names).toEqual(['a', 'b'])
  await expectCode(() => writer.write('b', b), 'SAVE_TENSOR', '"a"')
  await writer.write('a', a)
  await expectCode(() => writer.write('a', a), 'SAVE_TENSOR', '"b"')
  await expectCode(() => writer.finish(), 'SAVE_TENSOR', '"b"')
  await writer.write('b', b)
  await expectCode(() => writer.write('c', a), 'SAVE_TENSOR', 'none')
  await writer.finish()
  expect(await openFiles(folder)).toBe(0)
})

test('refuses names that other readers refuse, and files that exist, and opens none', async () => {
  const folder = await temporaryFolder()
  const path = join(folder, 'w')
  const types = (name: string) => new Map([[name, { dtype: 'float32', shape: [1] } as const]])
  await expectCode(() => SafetensorsWriter.create(path, types('__metadata__')), 'SAFETENSORS_NAME', path)
  await expectCode(() => SafetensorsWriter.create(path, types('\ud800')), 'SAFETENSORS_NAME', path)
  await expectCode(() => SafetensorsWriter.create(path, TWO, { metadata: { a: '\ud800' } }), 'SAFETENSORS_NAME')
  const long = { note: 'x'.repeat(100_000_000) }
  await expectCode(() => SafetensorsWriter.create(path, TWO, { metadata: long }), 'SAFETENSORS_HEADER_LENGTH', path)
  expect(await readdir(folder)).toEqual([])
  await writeFile(path, 'mine')
  await expectCode(() => SafetensorsWriter.create(path, TWO), 'SAVE_FAILED', 'EEXIST')
  expect(await readFile(path, 'utf8')).toBe('mine')
  expect(await openFiles(folder)).toBe(0)
})

import { execFileSync } from 'node:child_process'
import { mkdir, readFile, rm, symlink, truncate, writeFile } from 'node:fs/promises'
import { dirname, join } from 'node:path'
import { describe, expect, test } from 'vitest'
import { Checkpoint } from '../../src/checkpoint/checkpoint.ts'
import { expectCode, openFiles, patternBytes, rawFile, temporaryFolder } from './files.ts'

const NAME = 'diffusion_pytorch_model'
const INDEX = `${NAME}.safetensors.index.json`
const FIRST = `${NAME}-00001-of-00002.safetensors`
const SECOND = `${NAME}-00002-of-00002.safetensors`

/** A file with one tensor of 4 x 6 bytes. */
function fileOf(name: string): Buffer {
  return rawFile({ [name]: { dtype: 'U8', shape: [4, 6], data_offsets: [0, 24] } }, patternBytes(24))
}

function indexOf(weightMap: object, metadata: object = { total_size: 48 }): string {
  return JSON.stringify({ metadata, weight_map: weightMap })
}

async function folderOf(files: Readonly<Record<string, string | Buffer>>): Promise<string> {
  const folder = await temporaryFolder()
  for (const [name, content] of Object.entries(files)) {
    await mkdir(dirname(join(folder, name)), { recursive: true })
    await writeFile(join(folder, name), content)
  }
  return folder
}

const sharded = () =>
  folderOf({ [INDEX]: indexOf({ a: FIRST, b: SECOND }), [FIRST]: fileOf('a'), [SECOND]: fileOf('b') })

describe('opening', () => {
  test('a single file', async () => {
    const folder = await folderOf({ [`${NAME}.safetensors`]: fileOf('a'), 'config.json': '{}' })
    await using checkpoint = await Checkpoint.open(folder)
    expect([...checkpoint.tensors.keys()]).toEqual(['a'])
    expect(checkpoint.location).toBe(folder)
  })

  test('the weights of another name', async () => {
    const folder = await folderOf({ 'model.safetensors': fileOf('a') })
    await using checkpoint = await Checkpoint.open(folder, { weightsName: 'model' })
    expect(checkpoint.tensors.get('a')?.file).toBe(join(folder, 'model.safetensors'))
    await expectCode(() => Checkpoint.open(folder), 'CHECKPOINT_NOT_FOUND', folder, INDEX, 'model.safetensors')
  })

  test('several files with an index, whose statistics are one', async () => {
    await using checkpoint = await Checkpoint.open(await sharded())
    expect([...checkpoint.tensors.keys()]).toEqual(['a', 'b'])
    await checkpoint.read('a')
    await checkpoint.read('b', { dim: 0, ranges: [[0, 2]] })
    expect(checkpoint.stats).toMatchObject({ bytesRead: 36, largestBuffer: 24, tensorsRead: 2 })
    expect(checkpoint.stats.largestBuffers).toEqual(
      new Map([
        ['a', 24],
        ['b', 12],
      ]),
    )
  })

  test('the index rather than a single file', async () => {
    const folder = await sharded()
    await writeFile(join(folder, `${NAME}.safetensors`), 'stale')
    await using checkpoint = await Checkpoint.open(folder)
    expect(checkpoint.tensors.size).toBe(2)
  })

  test('closes its files', async () => {
    const folder = await sharded()
    const checkpoint = await Checkpoint.open(folder)
    const source = checkpoint.source('a')
    if (process.platform === 'linux') expect(await openFiles(folder)).toBe(2)
    await checkpoint.close()
    await checkpoint.close()
    expect(await openFiles(folder)).toBe(0)
    await expectCode(() => source.read(), 'SAFETENSORS_CLOSED', '"a"')
  })
})

describe('sources', () => {
  test('describe a part before it is read', async () => {
    await using checkpoint = await Checkpoint.open(await sharded())
    const { byteOffset } = checkpoint.tensors.get('b') as { byteOffset: number }
    const slices = {
      dim: 0,
      ranges: [
        [0, 1],
        [2, 4],
      ],
    } as const
    const source = checkpoint.source('b', slices)
    expect(source).toMatchObject({
      name: 'b',
      dtype: 'uint8',
      fullShape: [4, 6],
      shape: [3, 6],
      byteLength: 18,
      slices,
    })
    expect(source.file).toBe(join(checkpoint.location, SECOND))
    expect(source.ranges()).toEqual([
      { offset: byteOffset, length: 6 },
      { offset: byteOffset + 12, length: 12 },
    ])
    expect(checkpoint.stats.bytesRead).toBe(0)

    const bytes = await readFile(source.file)
    const mapped = (source.ranges() ?? []).map(({ offset, length }) => bytes.subarray(offset, offset + length))
    expect(Buffer.from((await source.read()).data as Uint8Array)).toEqual(Buffer.concat(mapped))
  })

  test('have ranges where the part is contiguous', async () => {
    await using checkpoint = await Checkpoint.open(await sharded())
    const { byteOffset } = checkpoint.tensors.get('a') as { byteOffset: number }
    const whole = [{ offset: byteOffset, length: 24 }]
    expect(checkpoint.source('a').ranges()).toEqual(whole)
    expect(
      checkpoint
        .source('a', {
          dim: 1,
          ranges: [
            [0, 2],
            [2, 6],
          ],
        })
        .ranges(),
    ).toEqual(whole)
    expect(
      checkpoint
        .source('a', {
          dim: 0,
          ranges: [
            [1, 2],
            [2, 3],
          ],
        })
        .ranges(),
    ).toEqual([{ offset: byteOffset + 6, length: 12 }])
    expect(checkpoint.source('a', { dim: 1, ranges: [] }).ranges()).toEqual([])
    expect(checkpoint.source('a', { dim: 1, ranges: [[0, 3]] }).ranges()).toBeUndefined()
  })

  test('are refused for tensors or parts that are not there', async () => {
    await using checkpoint = await Checkpoint.open(await sharded())
    await expectCode(() => checkpoint.source('c'), 'TENSOR_NOT_FOUND', checkpoint.location, '"c"')
    await expectCode(() => checkpoint.read('c'), 'TENSOR_NOT_FOUND', checkpoint.location, '"c"')
    await expectCode(() => checkpoint.source('a', { dim: 0, ranges: [[0, 5]] }), 'SHARD_SLICES', '"a"', FIRST)
  })
})

describe('refusing', () => {
  test('folders without weights', async () => {
    const folder = await folderOf({ 'config.json': '{}' })
    await expectCode(() => Checkpoint.open(folder), 'CHECKPOINT_NOT_FOUND', INDEX, `${NAME}.safetensors`, 'config.json')
    await expectCode(() => Checkpoint.open(join(folder, 'absent')), 'CHECKPOINT_NOT_FOUND', 'absent', 'ENOENT')
    await expectCode(() => Checkpoint.open(join(folder, 'config.json')), 'CHECKPOINT_NOT_FOUND', 'ENOTDIR')
  })

  test.each(['model.bin', 'pytorch_model.bin.index.json', 'model.pt', 'sd.ckpt', 'flux2-Q4.gguf'])(
    '%s',
    async (file) => {
      const folder = await folderOf({ [file]: 'weights' })
      await expectCode(() => Checkpoint.open(folder), 'CHECKPOINT_FORMAT', folder, file, 'safetensors only')
    },
  )

  test('an index of files in another format', async () => {
    const folder = await folderOf({ [INDEX]: indexOf({ a: 'pytorch_model.bin' }) })
    await expectCode(() => Checkpoint.open(folder), 'CHECKPOINT_FORMAT', folder, 'pytorch_model.bin')
  })

  test.each([
    ['broken JSON', '{'],
    ['an array', '[]'],
    ['no weight_map', '{"metadata":{}}'],
    ['an empty weight_map', '{"weight_map":{}}'],
    ['a weight_map of numbers', '{"weight_map":{"a":1}}'],
    ['a repeated tensor', `{"weight_map":{"a":"${FIRST}","a":"${SECOND}"}}`],
    ['deep nesting', `{"metadata":${'['.repeat(10_000)}`],
    ['millions of keys', `{"metadata":[${'0,'.repeat(2_000_000)}0]}`],
  ])('an index that is malformed: %s', async (_, index) => {
    const folder = await folderOf({ [INDEX]: index, [FIRST]: fileOf('a'), [SECOND]: fileOf('b') })
    await expectCode(() => Checkpoint.open(folder), 'CHECKPOINT_INDEX', join(folder, INDEX))
  })

  test('an index that is no file, or too long', async () => {
    const folder = await folderOf({ [FIRST]: fileOf('a') })
    execFileSync('mkfifo', [join(folder, INDEX)])
    await expectCode(() => Checkpoint.open(folder), 'CHECKPOINT_INDEX', join(folder, INDEX), 'regular file')
    await rm(join(folder, INDEX))
    await writeFile(join(folder, INDEX), '')
    await truncate(join(folder, INDEX), 100_000_001)
    await expectCode(() => Checkpoint.open(folder), 'CHECKPOINT_INDEX', join(folder, INDEX), 'more than 100000000')
  })

  test.each([
    ['a tensor that is in no file', { a: FIRST, b: SECOND, c: SECOND }, SECOND, '"c"'],
    ['a tensor in the wrong file', { a: SECOND, b: FIRST }, SECOND, '"a"'],
    ['fewer tensors than the files', { a: FIRST, x: SECOND }, SECOND, '"x"'],
  ])('an index that lies: %s', async (_, weightMap, file, tensor) => {
    const folder = await folderOf({ [INDEX]: indexOf(weightMap), [FIRST]: fileOf('a'), [SECOND]: fileOf('b') })
    await expectCode(() => Checkpoint.open(folder), 'CHECKPOINT_INDEX_MISMATCH', join(folder, file), tensor)
  })

  test('a file with a tensor that the index does not know', async () => {
    const two = { dtype: 'U8', shape: [1], data_offsets: [0, 1] }
    const file = rawFile({ a: two, b: { ...two, data_offsets: [1, 2] } }, patternBytes(2))
    const folder = await folderOf({ [INDEX]: indexOf({ a: FIRST }), [FIRST]: file })
    await expectCode(() => Checkpoint.open(folder), 'CHECKPOINT_INDEX_MISMATCH', join(folder, FIRST), '"b"')
  })

  test('a file that is missing, or corrupt, without leaving others open', async () => {
    const folder = await sharded()
    await writeFile(join(folder, SECOND), fileOf('b').subarray(0, -1))
    await expectCode(() => Checkpoint.open(folder), 'SAFETENSORS_TRUNCATED', join(folder, SECOND), '"b"')
    await rm(join(folder, SECOND))
    await expectCode(() => Checkpoint.open(folder), 'CHECKPOINT_FILE_MISSING', folder, SECOND)
    expect(await openFiles(folder)).toBe(0)
  })
})

describe('staying inside the folder', () => {
  const outside = () => folderOf({ 'secret/weights.safetensors': fileOf('a'), 'models/config.json': '{}' })

  test.each([
    '../secret/weights.safetensors',
    'x/../../secret/weights.safetensors',
    '/etc/weights.safetensors',
    '..\\secret\\weights.safetensors',
    'C:\\weights.safetensors',
    '\\\\host\\share\\weights.safetensors',
    'weights\0.safetensors',
    '../.safetensors',
  ])('%j', async (name) => {
    const models = join(await outside(), 'models')
    await writeFile(join(models, INDEX), indexOf({ a: name }))
    await expectCode(() => Checkpoint.open(models), 'CHECKPOINT_PATH', models)
  })

  test('allows files in subfolders', async () => {
    const folder = await folderOf({ [INDEX]: indexOf({ a: `shards/${FIRST}` }), [`shards/${FIRST}`]: fileOf('a') })
    await using checkpoint = await Checkpoint.open(folder)
    expect(checkpoint.tensors.get('a')?.file).toBe(join(folder, 'shards', FIRST))
  })

  test('refuses links that leave the folder, and follows those that do not', async () => {
    const folder = await outside()
    const link = join(folder, 'models', `${NAME}.safetensors`)
    await symlink('../secret/weights.safetensors', link)
    await expectCode(() => Checkpoint.open(join(folder, 'models')), 'CHECKPOINT_PATH', 'secret')

    await rm(link)
    await writeFile(join(folder, 'models', 'real.safetensors'), fileOf('a'))
    await symlink('real.safetensors', link)
    await using checkpoint = await Checkpoint.open(join(folder, 'models'))
    expect(checkpoint.tensors.size).toBe(1)

    await symlink(join(folder, 'models'), join(folder, 'alias'))
    await using aliased = await Checkpoint.open(join(folder, 'alias'))
    expect(aliased.tensors.size).toBe(1)
  })

  test('refuses an index that is a link out of the folder', async () => {
    const folder = await outside()
    await writeFile(join(folder, 'secret', 'index.json'), indexOf({ a: FIRST }))
    await symlink('../secret/index.json', join(folder, 'models', INDEX))
    await expectCode(() => Checkpoint.open(join(folder, 'models')), 'CHECKPOINT_PATH', INDEX)
  })

  test('follows the links of the Hugging Face cache, and no others from there', async () => {
    const hash = '0123456789abcdef'.repeat(4)
    const cache = await folderOf({ [`models--x/blobs/${hash}`]: fileOf('a'), 'models--y/blobs/other': fileOf('a') })
    const snapshot = join(cache, 'models--x', 'snapshots', 'f'.repeat(40))
    const transformer = join(snapshot, 'transformer')
    await mkdir(transformer, { recursive: true })

    const link = join(snapshot, `${NAME}.safetensors`)
    await symlink(`../../blobs/${hash}`, link)
    await using root = await Checkpoint.open(snapshot)
    expect((await root.read('a')).byteLength).toBe(24)
    await symlink(`../../../blobs/${hash}`, join(transformer, `${NAME}.safetensors`))
    await using subfolder = await Checkpoint.open(transformer)
    expect(subfolder.tensors.size).toBe(1)

    for (const target of ['../../../models--y/blobs/other', '../../../models--x', '../../blobs']) {
      await rm(link)
      await symlink(target, link)
      await expectCode(() => Checkpoint.open(snapshot), 'CHECKPOINT_PATH', snapshot)
    }
    await rm(link)
    await symlink('../../blobs/absent', link)
    await expectCode(() => Checkpoint.open(snapshot), 'CHECKPOINT_FILE_MISSING', snapshot)
  })
})

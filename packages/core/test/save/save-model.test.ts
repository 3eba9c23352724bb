import { mkdir, readdir, readFile, symlink, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { describe, expect, test } from 'vitest'
import { Checkpoint } from '../../src/checkpoint/checkpoint.ts'
import { type SaveModelOptions, type SaveProgress, saveModel } from '../../src/save/index.ts'
import { Tensor } from '../../src/tensor.ts'
import { expectCode, openFiles, temporaryFolder } from '../checkpoint/files.ts'
import { digests, TINY_MODELS, type TinyModel, tinyModel } from './flux2-tiny.ts'
import { failSync, fillDiskAfter, onSync, shortenWrites, snapshot } from './folders.ts'

const WEIGHTS = 'diffusion_pytorch_model'

/** Three weights of 8, 12 and 4 bytes. */
const SMALL: ReadonlyMap<string, Tensor> = new Map([
  ['b', Tensor.float32([2], [1, 2])],
  ['a', Tensor.float32([3], [3, 4, 5])],
  ['c', Tensor.float32([1], [6])],
])

function optionsFor(tensors: ReadonlyMap<string, Tensor>, options: Partial<SaveModelOptions> = {}): SaveModelOptions {
  return {
    component: 'transformer',
    config: '{"a": 1.0}\n',
    weightsName: WEIGHTS,
    tensors,
    read: async (name) => tensors.get(name) as Tensor,
    ...options,
  }
}

function save(directory: string, model: TinyModel, options: Partial<SaveModelOptions> = {}): Promise<void> {
  return saveModel(directory, optionsFor(model.tensors, { config: model.config, ...options }))
}

async function readBack(directory: string): Promise<ReadonlyMap<string, Tensor>> {
  await using checkpoint = await Checkpoint.open(directory)
  const tensors = new Map<string, Tensor>()
  for (const name of checkpoint.tensors.keys()) tensors.set(name, await checkpoint.read(name))
  return tensors
}

describe.each(Object.keys(TINY_MODELS) as (keyof typeof TINY_MODELS)[])('%s', (name) => {
  test('is saved byte for byte as diffusers saved it', async () => {
    const model = await tinyModel(name)
    const folder = await temporaryFolder()
    await save(folder, model, { maxShardSize: model.maxShardSize })
    const [saved, expected] = [await snapshot(folder), await snapshot(model.directory)]
    expect([...saved.keys()]).toEqual([...expected.keys()])
    for (const [file, content] of expected) expect(saved.get(file) === content, file).toBe(true)
  })

  test('is saved in one file where it fits, and read back', async () => {
    const model = await tinyModel(name)
    const folder = join(await temporaryFolder(), 'new', 'folder')
    await save(folder, model)
    expect((await readdir(folder)).sort()).toEqual(['config.json', `${WEIGHTS}.safetensors`])
    expect(await readFile(join(folder, 'config.json'), 'utf8')).toBe(model.config)
    expect(digests(await readBack(folder))).toEqual(digests(model.tensors))
  })
})

test('asks for one weight at a time and reports every byte', async () => {
  const model = await tinyModel('flux2-klein-tiny')
  const progress: SaveProgress[] = []
  let [reading, most] = [0, 0]
  await save(await temporaryFolder(), model, {
    maxShardSize: 200_000,
    onProgress: (report) => progress.push(report),
    read: async (name) => {
      most = Math.max(most, ++reading)
      await new Promise((resolve) => setImmediate(resolve))
      reading--
      return model.tensors.get(name) as Tensor
    },
  })
  expect(most).toBe(1)
  const totalBytes = [...model.tensors.values()].reduce((sum, { byteLength }) => sum + byteLength, 0)
  expect(progress).toHaveLength(model.tensors.size)
  expect(progress.at(-1)).toEqual({ component: 'transformer', savedBytes: totalBytes, totalBytes })
  const saved = progress.map(({ savedBytes }) => savedBytes)
  expect(saved).toEqual([...saved].sort((a, b) => a - b))
})

test('writes more than one call and one sync take', async () => {
  const data = new Float32Array(11 * 1024 * 1024)
  for (let i = 0; i < data.length; i += 1000) data[i] = i
  const folder = await temporaryFolder()
  const progress: number[] = []
  await saveModel(
    folder,
    optionsFor(new Map([['big', Tensor.float32([data.length], data)], ...SMALL]), {
      onProgress: ({ savedBytes }) => progress.push(savedBytes),
    }),
  )
  const read = (await readBack(folder)).get('big')?.data as Float32Array
  expect(Buffer.compare(Buffer.from(read.buffer), Buffer.from(data.buffer))).toBe(0)
  expect(progress.length).toBeGreaterThan(SMALL.size + 1)
})

test('an abort stops in the middle of a weight', async () => {
  const folder = await temporaryFolder()
  const controller = new AbortController()
  const progress: number[] = []
  const options = optionsFor(new Map([['big', Tensor.zeros('uint8', [40 * 1024 * 1024])]]), {
    signal: controller.signal,
    onProgress: ({ savedBytes }) => {
      progress.push(savedBytes)
      controller.abort(new Error('enough'))
    },
  })
  await expectCode(() => saveModel(folder, options), 'ABORTED')
  expect(progress).toEqual([16 * 1024 * 1024])
})

describe('an earlier save', () => {
  const layouts = [
    ['one file', '1GB'],
    ['three files', '8KB'],
    ['two files', '16KB'],
  ] as const
  const tensors = new Map(
    [...SMALL].map(([name, { shape }]) => [name, Tensor.zeros('float32', [1000 * (shape[0] ?? 0)])]),
  )
  const filesOf = async (maxShardSize: string) => {
    const folder = await temporaryFolder()
    await saveModel(folder, optionsFor(tensors, { maxShardSize }))
    return snapshot(folder)
  }

  test.each(layouts.flatMap((before) => layouts.map((after) => [before, after] as const)))(
    'in %s is replaced by one in %s',
    async ([, before], [, after]) => {
      const folder = await temporaryFolder()
      await saveModel(folder, optionsFor(tensors, { maxShardSize: before, config: '{"old": true}' }))
      await saveModel(folder, optionsFor(tensors, { maxShardSize: after }))
      expect(await snapshot(folder)).toEqual(await filesOf(after))
      expect((await readBack(folder)).size).toBe(3)
    },
  )

  test('the layouts differ', async () => {
    const counts = await Promise.all(layouts.map(async ([, size]) => (await filesOf(size)).size))
    expect(counts).toEqual([2, 5, 4])
  })

  test('leaves files that are not its own', async () => {
    const folder = await temporaryFolder()
    const others = [
      'README.md',
      `${WEIGHTS}.fp16.safetensors`,
      `${WEIGHTS}.fp16-00001-of-00002.safetensors`,
      `${WEIGHTS}-00001-of-00002.bin`,
      `${WEIGHTS}-1-of-2.safetensors`,
      'other-00001-of-00002.safetensors',
    ]
    for (const name of others) await writeFile(join(folder, name), name)
    await mkdir(join(folder, 'sub'))
    await writeFile(join(folder, `${WEIGHTS}-00001-of-00009.safetensors`), 'stale')
    await saveModel(folder, optionsFor(SMALL))
    expect((await readdir(folder)).sort()).toEqual([...others, 'sub', 'config.json', `${WEIGHTS}.safetensors`].sort())
  })

  test('that links to a cache leaves the cache as it is', async () => {
    const [folder, cache] = [await temporaryFolder(), await temporaryFolder()]
    await writeFile(join(cache, 'blob'), 'cached')
    await symlink(join(cache, 'blob'), join(folder, `${WEIGHTS}.safetensors`))
    await symlink(join(cache, 'nowhere'), join(folder, 'config.json'))
    await saveModel(folder, optionsFor(SMALL))
    expect(await readFile(join(cache, 'blob'), 'utf8')).toBe('cached')
    expect(await readdir(cache)).toEqual(['blob'])
    expect((await readBack(folder)).size).toBe(3)
  })

  test('can be replaced by a model that is read from it', async () => {
    const model = await tinyModel('flux2-klein-tiny')
    const folder = await temporaryFolder()
    await save(folder, model, { maxShardSize: '700KB' })
    await using checkpoint = await Checkpoint.open(folder)
    await save(folder, model, { maxShardSize: '300KB', read: (name) => checkpoint.read(name) })
    expect(digests(await readBack(folder))).toEqual(digests(model.tensors))
  })
})

describe('is refused before anything is written', () => {
  test.each([
    ['SAVE_SHARD_SIZE', { maxShardSize: '5 parsecs' }],
    ['CONFIG_INVALID', { config: '{' }],
    ['CONFIG_INVALID', { config: '[]' }],
    ['CONFIG_INVALID', { config: 'null' }],
    ['ABORTED', { signal: AbortSignal.abort() }],
  ] as const)('with %s', async (code, options) => {
    const parent = await temporaryFolder()
    await expectCode(() => saveModel(join(parent, 'new'), optionsFor(SMALL, options)), code)
    expect(await readdir(parent)).toEqual([])
  })

  test('with SAVE_TARGET where a file is in the place of the folder', async () => {
    const parent = await temporaryFolder()
    await writeFile(join(parent, 'taken'), 'mine')
    await expectCode(() => saveModel(join(parent, 'taken'), optionsFor(SMALL)), 'SAVE_TARGET', 'taken')
    expect(await readFile(join(parent, 'taken'), 'utf8')).toBe('mine')
    await expectCode(() => saveModel(join(parent, 'taken', 'sub'), optionsFor(SMALL)), 'SAVE_TARGET', 'taken')
  })

  test.each(['config.json', `${WEIGHTS}.safetensors`, `${WEIGHTS}-00001-of-00003.safetensors`])(
    'with SAVE_TARGET where a folder is in the place of %s',
    async (name) => {
      const folder = await temporaryFolder()
      await mkdir(join(folder, name))
      await expectCode(() => saveModel(folder, optionsFor(SMALL)), 'SAVE_TARGET', name)
      expect(await readdir(folder)).toEqual([name])
    },
  )

  test.each([`${WEIGHTS}.shards.json`, `${WEIGHTS}.rank-00000-of-00002.safetensors`])(
    'with SAVE_TARGET where shards of ranks are: %s',
    async (name) => {
      const folder = await temporaryFolder()
      await writeFile(join(folder, name), 'shards')
      await expectCode(() => saveModel(folder, optionsFor(SMALL)), 'SAVE_TARGET', name)
      expect(await readdir(folder)).toEqual([name])
    },
  )

  test('with SAVE_FAILED where no folder can be made', async () => {
    await expectCode(() => saveModel('/proc/rankwise/model', optionsFor(SMALL)), 'SAVE_FAILED', '/proc/rankwise')
  })
})

/** Ways to fail in the middle, with the code of the error. */
const failures: readonly (readonly [what: string, code: string, begin: () => Promise<Partial<SaveModelOptions>>])[] = [
  [
    'reading a weight fails',
    'DEVICE_LOST',
    async () => ({
      read: async (name) => {
        if (name === 'c') throw Object.assign(new Error('gone'), { code: 'DEVICE_LOST' })
        return SMALL.get(name) as Tensor
      },
    }),
  ],
  ['a weight has another dtype', 'SAVE_TENSOR', async () => ({ read: async () => Tensor.zeros('bfloat16', [3]) })],
  ['a weight has another shape', 'SAVE_TENSOR', async () => ({ read: async () => Tensor.float32([2], [1, 2]) })],
  [
    'it is aborted',
    'ABORTED',
    async () => {
      const controller = new AbortController()
      return { signal: controller.signal, onProgress: () => controller.abort(new Error('enough')) }
    },
  ],
  [
    'it is aborted after the last weight',
    'ABORTED',
    async () => {
      const controller = new AbortController()
      return {
        signal: controller.signal,
        onProgress: ({ savedBytes, totalBytes }: SaveProgress) => {
          if (savedBytes === totalBytes) controller.abort()
        },
      }
    },
  ],
  [
    'it is aborted while the index is written',
    'ABORTED',
    async () => {
      const controller = new AbortController()
      // The config, three files, and the index.
      await onSync((count) => {
        if (count === 5) controller.abort()
      })
      return { signal: controller.signal }
    },
  ],
  [
    'the listener of progress fails',
    'LISTENER',
    async () => ({
      onProgress: () => {
        throw Object.assign(new Error('listener'), { code: 'LISTENER' })
      },
    }),
  ],
  ...[0, 10, 150, 300].map(
    (bytes) =>
      [
        `the disk is full after ${bytes} bytes`,
        'SAVE_FAILED',
        async () => {
          await fillDiskAfter(bytes)
          return {}
        },
      ] as const,
  ),
  [
    'the disk breaks',
    'SAVE_FAILED',
    async () => {
      await failSync()
      return {}
    },
  ],
]

describe.each(failures)('when %s', (_, code, begin) => {
  test('a new folder is not there', async () => {
    const parent = await temporaryFolder()
    const options = await begin()
    await expect(
      saveModel(join(parent, 'a', 'b'), optionsFor(SMALL, { maxShardSize: 12, ...options })),
    ).rejects.toMatchObject({ code })
    expect(await readdir(parent)).toEqual([])
    expect(await openFiles(parent)).toBe(0)
  })

  test('an earlier save is as it was', async () => {
    const folder = await temporaryFolder()
    await saveModel(folder, optionsFor(SMALL, { config: '{"old": 1}', maxShardSize: 12 }))
    const before = await snapshot(folder)
    const options = await begin()
    await expect(saveModel(folder, optionsFor(SMALL, { maxShardSize: 12, ...options }))).rejects.toMatchObject({ code })
    expect(await snapshot(folder)).toEqual(before)
    expect(await openFiles(folder)).toBe(0)
  })
})

test('goes on where the disk takes a part of a write', async () => {
  const folder = await temporaryFolder()
  await shortenWrites(5)
  await saveModel(folder, optionsFor(SMALL))
  expect(digests(await readBack(folder))).toEqual(digests(SMALL))
})

test('has every file on disk before it moves one', async () => {
  const folder = await temporaryFolder()
  const before: number[] = []
  await onSync(() => before.push(1))
  await saveModel(folder, optionsFor(SMALL, { maxShardSize: 12 }))
  expect(before).toHaveLength(await readdir(folder).then((names) => names.length))
})

test('says what to do about a full disk', async () => {
  const folder = await temporaryFolder()
  await fillDiskAfter(10)
  await expectCode(() => saveModel(folder, optionsFor(SMALL)), 'SAVE_FAILED', folder, 'ENOSPC', 'free disk space')
})

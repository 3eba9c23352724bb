import { copyFile, mkdir, readdir, readFile, rm, truncate, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { beforeAll, describe, expect, test } from 'vitest'
import { RankwiseError } from '../../src/errors.ts'
import { REPLICATED, shard, shardSlices } from '../../src/placement.ts'
import {
  openWeights,
  type SaveProgress,
  type SaveShardsOptions,
  ShardedCheckpoint,
  saveModel,
  saveShards,
} from '../../src/save/index.ts'
import { sliceTensor } from '../../src/slice-tensor.ts'
import { Tensor } from '../../src/tensor.ts'
import { expectCode, openFiles, temporaryFolder } from '../checkpoint/files.ts'
import { digests, sha256, shardGoldens, TINY_MODELS, type TinyModel, tinyModel } from './flux2-tiny.ts'
import { fillDiskAfter, onSync, skipSync, snapshot } from './folders.ts'
import { MemoryRanks } from './memory-ranks.ts'

const WEIGHTS = 'diffusion_pytorch_model'

type Content = Pick<TinyModel, 'config' | 'tensors' | 'placements'>
type Change = (rank: number, ranks: MemoryRanks) => Partial<SaveShardsOptions>

/** Saves at a degree, on ranks of this process; `change` gives each rank other options. */
async function saveAt(
  tpDegree: number,
  directory: string,
  { config, tensors, placements }: Content,
  change: Change = () => ({}),
): Promise<PromiseSettledResult<void>[]> {
  const ranks = new MemoryRanks(tpDegree)
  return ranks.run((collectives, rank) =>
    saveShards(directory, {
      component: 'transformer',
      config,
      weightsName: WEIGHTS,
      tensors,
      placements,
      collectives,
      read: async (name) =>
        sliceTensor(
          tensors.get(name) as Tensor,
          shardSlices(placements.get(name)?.placement ?? REPLICATED, rank, tpDegree),
        ),
      ...change(rank, ranks),
    }),
  )
}

async function savedAt(tpDegree: number, directory: string, content: Content): Promise<void> {
  for (const result of await saveAt(tpDegree, directory, content)) {
    if (result.status === 'rejected') throw result.reason
  }
}

/** Code of every rank's error; `saved` where there is none. */
function codesOf(results: readonly PromiseSettledResult<void>[]): readonly string[] {
  return results.map((result) => (result.status === 'fulfilled' ? 'saved' : (result.reason as RankwiseError).code))
}

const SMALL: Content = {
  config: '{"a": 1.0}\n',
  tensors: new Map([
    [
      'rows',
      Tensor.float32(
        [8, 2],
        Float32Array.from({ length: 16 }, (_, i) => i),
      ),
    ],
    [
      'columns',
      Tensor.float32(
        [2, 8],
        Float32Array.from({ length: 16 }, (_, i) => 100 + i),
      ),
    ],
    ['norm', Tensor.float32([3], [7, 8, 9])],
  ]),
  placements: new Map([
    ['rows', { placement: shard(0, [8]), splitInput: false }],
    ['columns', { placement: shard(1, [4, 4]), splitInput: false }],
  ]),
}

describe.each(Object.keys(TINY_MODELS) as (keyof typeof TINY_MODELS)[])('%s', (name) => {
  let model: TinyModel

  beforeAll(async () => {
    model = await tinyModel(name)
  })

  test.each([1, 2, 4])(
    'saved at degree %i gives every rank at 1, 2 and 4 what diffusers loads',
    async (savedDegree) => {
      await skipSync()
      const folder = await temporaryFolder()
      await savedAt(savedDegree, folder, model)
      await using weights = await openWeights(folder)
      expect([...weights.tensors.keys()]).toEqual([...model.tensors.keys()])

      const goldens = shardGoldens(name)
      for (const [tpDegree, ranks] of [[2, goldens.tp2] as const, [4, goldens.tp4] as const]) {
        expect(ranks).toHaveLength(tpDegree)
        for (const [rank, parameters] of ranks.entries()) {
          const before = weights.stats.bytesRead
          let shardBytes = 0
          for (const [parameter, golden] of Object.entries(parameters)) {
            const placement = model.placements.get(parameter)?.placement ?? REPLICATED
            const tensor = await weights.source(parameter, shardSlices(placement, rank, tpDegree)).read()
            shardBytes += tensor.byteLength
            expect(sha256(tensor), `${parameter} of rank ${rank} of ${tpDegree}`).toBe(golden.sha256)
          }
          expect(weights.stats.bytesRead - before).toBe(shardBytes)
        }
      }

      const whole = new Map<string, Tensor>()
      for (const parameter of weights.tensors.keys()) whole.set(parameter, await weights.source(parameter).read())
      expect(digests(whole)).toEqual(digests(model.tensors))
    },
  )
})

test('writes a file per rank, replicated weights once, and a manifest', async () => {
  const folder = join(await temporaryFolder(), 'new', 'folder')
  await savedAt(2, folder, SMALL)
  const files = [`${WEIGHTS}.rank-00000-of-00002.safetensors`, `${WEIGHTS}.rank-00001-of-00002.safetensors`]
  expect((await readdir(folder)).sort()).toEqual(['config.json', ...files, `${WEIGHTS}.shards.json`])
  expect(await readFile(join(folder, 'config.json'), 'utf8')).toBe(SMALL.config)

  const manifest = JSON.parse(await readFile(join(folder, `${WEIGHTS}.shards.json`), 'utf8'))
  const sizes = await Promise.all(files.map(async (name) => (await readFile(join(folder, name))).length))
  expect(manifest).toEqual({
    format: 'rankwise-shards',
    version: 1,
    save_id: expect.stringMatching(/^[0-9a-f]{32}$/),
    tp_degree: 2,
    files: files.map((name, rank) => ({ name, bytes: sizes[rank] })),
    parameters: {
      rows: { dtype: 'float32', shape: [8, 2], shard: { dim: 0, blocks: [8] } },
      columns: { dtype: 'float32', shape: [2, 8], shard: { dim: 1, blocks: [4, 4] } },
      norm: { dtype: 'float32', shape: [3] },
    },
  })
  expect(sizes[0]).toBeGreaterThan(sizes[1] as number)
})

test('a part in one file can be mapped, one in several or in every row cannot', async () => {
  const folder = await temporaryFolder()
  await savedAt(2, folder, SMALL)
  await using weights = await ShardedCheckpoint.open(folder)
  expect(weights.tpDegree).toBe(2)
  const rangesAt = (name: string, rank: number, tpDegree: number) =>
    weights.source(name, shardSlices(SMALL.placements.get(name)?.placement ?? REPLICATED, rank, tpDegree)).ranges()
  expect(rangesAt('rows', 1, 2)?.map(({ length }) => length)).toEqual([32])
  expect(rangesAt('rows', 3, 4)?.map(({ length }) => length)).toEqual([16])
  expect(rangesAt('rows', 0, 1)).toBeUndefined()
  expect(rangesAt('columns', 1, 2)?.map(({ length }) => length)).toEqual([32])
  expect(rangesAt('columns', 1, 4)).toBeUndefined()
  expect(rangesAt('norm', 1, 4)?.map(({ length }) => length)).toEqual([12])

  // A loader goes through weights in the order of the files.
  const offsets = [...weights.tensors.values()].map(({ byteOffset }) => byteOffset)
  expect(offsets.map((offset) => offset - (weights.tensors.get('columns')?.byteOffset ?? 0))).toEqual([44, 0, 32])
})

test('gathers large weights', async () => {
  await skipSync()
  const folder = await temporaryFolder()
  const data = Float32Array.from({ length: 6000 * 512 }, (_, i) => i)
  const tensors = new Map([['columns', Tensor.float32([6000, 512], data)]])
  const placements = new Map([['columns', { placement: shard(1, [128, 384]), splitInput: false }]])
  await savedAt(4, folder, { config: '{}', tensors, placements })
  await using weights = await ShardedCheckpoint.open(folder)
  for (const tpDegree of [1, 2, 8]) {
    const slices = shardSlices(shard(1, [128, 384]), tpDegree - 1, tpDegree)
    const part = await weights.source('columns', slices).read()
    expect(sha256(part)).toBe(sha256(sliceTensor(tensors.get('columns') as Tensor, slices)))
  }
})

test('every rank asks for one weight at a time, for its own alone, and reports its own bytes', async () => {
  const progress: SaveProgress[][] = [[], []]
  const asked: string[][] = [[], []]
  const results = await saveAt(2, await temporaryFolder(), SMALL, (rank) => ({
    onProgress: (report) => progress[rank]?.push(report),
    read: async (name) => {
      asked[rank]?.push(name)
      return sliceTensor(
        SMALL.tensors.get(name) as Tensor,
        shardSlices(SMALL.placements.get(name)?.placement ?? REPLICATED, rank, 2),
      )
    },
  }))
  expect(codesOf(results)).toEqual(['saved', 'saved'])
  expect(asked).toEqual([
    ['columns', 'norm', 'rows'],
    ['columns', 'rows'],
  ])
  expect(progress.map((reports) => reports.at(-1))).toEqual([
    { component: 'transformer', savedBytes: 76, totalBytes: 76 },
    { component: 'transformer', savedBytes: 64, totalBytes: 64 },
  ])
})

describe('an earlier save', () => {
  test.each([
    [4, 2],
    [1, 4],
    [2, 2],
  ])('at degree %i is replaced by one at %i', async (before, after) => {
    const folder = await temporaryFolder()
    await writeFile(join(folder, 'README.md'), 'mine')
    await savedAt(before, folder, { ...SMALL, config: '{"old": 1}' })
    await savedAt(after, folder, SMALL)
    expect(await readdir(folder)).toHaveLength(after + 3)
    expect(await readFile(join(folder, 'config.json'), 'utf8')).toBe(SMALL.config)
    await using weights = await ShardedCheckpoint.open(folder)
    expect(weights.tpDegree).toBe(after)
  })

  test('of whole weights is not touched', async () => {
    const folder = await temporaryFolder()
    const { config, tensors } = SMALL
    const read = async (name: string) => tensors.get(name) as Tensor
    await saveModel(folder, { component: 'transformer', config, weightsName: WEIGHTS, tensors, read })
    const before = await snapshot(folder)
    const codes = codesOf(await saveAt(2, folder, SMALL))
    expect(codes).toEqual(['SAVE_TARGET', 'SAVE_TARGET'])
    expect(await snapshot(folder)).toEqual(before)
  })
})

/** What one rank does wrong, of four; every rank gets the code. */
const failures: readonly (readonly [
  what: string,
  code: string,
  change: (ranks: MemoryRanks) => Partial<SaveShardsOptions>,
])[] = [
  [
    'cannot read a weight',
    'DEVICE_LOST',
    () => ({ read: () => Promise.reject(new RankwiseError('DEVICE_LOST', 'gone')) }),
  ],
  ['fails with no code', 'RANK_FAILED', () => ({ read: () => Promise.reject(new TypeError('a bug')) })],
  ['has a weight of another shape', 'SAVE_TENSOR', () => ({ read: async () => Tensor.float32([1], [1]) })],
  ['is aborted before', 'ABORTED', () => ({ signal: AbortSignal.abort() })],
  [
    'is aborted meanwhile',
    'ABORTED',
    () => {
      const controller = new AbortController()
      return { signal: controller.signal, onProgress: () => controller.abort() }
    },
  ],
  [
    'is aborted at the end',
    'ABORTED',
    () => {
      const controller = new AbortController()
      const abortAtEnd = ({ savedBytes, totalBytes }: SaveProgress) => {
        if (savedBytes === totalBytes) controller.abort()
      }
      return { signal: controller.signal, onProgress: abortAtEnd }
    },
  ],
  ['has another config', 'CONFIG_INVALID', () => ({ config: 'no JSON' })],
  [
    'has another dtype',
    'SHARDS_FILE',
    () => ({
      tensors: new Map([...SMALL.tensors].map(([name, { shape }]) => [name, { dtype: 'float16' as const, shape }])),
      read: async (name) => {
        const placement = SMALL.placements.get(name)?.placement ?? REPLICATED
        return sliceTensor((SMALL.tensors.get(name) as Tensor).cast('float16'), shardSlices(placement, 2, 4))
      },
    }),
  ],
  [
    'is lost',
    'RANK_LOST',
    (ranks) => ({
      read: async () => {
        ranks.lose(2)
        throw new RankwiseError('RANK_LOST', 'rank 2 is gone')
      },
    }),
  ],
]

describe.each(failures)('when rank 2 of 4 %s', (_, code, change) => {
  const changeOf: Change = (rank, ranks) => (rank === 2 ? change(ranks) : {})

  test('no rank saves, and a new folder is not there', async () => {
    const parent = await temporaryFolder()
    const results = await saveAt(4, join(parent, 'a', 'b'), SMALL, changeOf)
    const own = code === 'RANK_FAILED' ? undefined : code
    expect(codesOf(results)).toEqual([code, code, own, code])
    expect(await readdir(parent)).toEqual([])
    expect(await openFiles(parent)).toBe(0)
  })

  test('an earlier save is as it was', async () => {
    const folder = await temporaryFolder()
    await savedAt(2, folder, SMALL)
    const before = await snapshot(folder)
    const results = await saveAt(4, folder, SMALL, changeOf)
    expect(codesOf(results)).not.toContain('saved')
    expect(await snapshot(folder)).toEqual(before)
  })
})

test('an abort while the manifest is written is not too late', async () => {
  const parent = await temporaryFolder()
  const controller = new AbortController()
  // Two files, the config, and the manifest.
  await onSync((count) => {
    if (count === 4) controller.abort()
  })
  const results = await saveAt(2, join(parent, 'new'), SMALL, (rank) =>
    rank === 0 ? { signal: controller.signal } : {},
  )
  expect(codesOf(results)).toEqual(['ABORTED', 'ABORTED'])
  expect(await readdir(parent)).toEqual([])
})

test('a file that only one rank cannot begin is closed by the others', async () => {
  const parent = await temporaryFolder()
  // Replicated, and so in the file of rank 0 alone.
  const tensors = new Map([...SMALL.tensors, ['broken \ud800', Tensor.float32([1], [1])]])
  const results = await saveAt(4, join(parent, 'new'), { ...SMALL, tensors })
  expect(codesOf(results)).toEqual(Array(4).fill('SAFETENSORS_NAME'))
  expect(await openFiles(parent)).toBe(0)
  expect(await readdir(parent)).toEqual([])
})

test('the other ranks learn which rank failed and why', async () => {
  const [, , , last] = await saveAt(4, await temporaryFolder(), SMALL, (rank) =>
    rank === 2 ? { read: () => Promise.reject(new RankwiseError('DEVICE_LOST', 'the device is gone')) } : {},
  )
  expect(String((last as PromiseRejectedResult).reason)).toMatch(
    /\[DEVICE_LOST\] rank 2 failed[\s\S]*the device is gone/,
  )
})

test('ranks with folders of their own are refused', async () => {
  const parent = await temporaryFolder()
  const results = await new MemoryRanks(2).run((collectives, rank) =>
    saveShards(join(parent, `rank${rank}`), {
      ...SMALL,
      component: 'transformer',
      weightsName: WEIGHTS,
      collectives,
      read: () => Promise.reject(new Error('too early')),
    }),
  )
  expect(codesOf(results)).toEqual(['SAVE_FAILED', 'SAVE_FAILED'])
  expect(String((results[1] as PromiseRejectedResult).reason)).toContain('all ranks share')
  expect(await readdir(parent)).toEqual([])
})

test.each([0, 150, 350, 500])('a disk that is full after %i bytes leaves the folder as it was', async (bytes) => {
  const folder = await temporaryFolder()
  await savedAt(2, folder, SMALL)
  const before = await snapshot(folder)
  await fillDiskAfter(bytes)
  const results = await saveAt(2, folder, SMALL)
  expect(codesOf(results)).toEqual(['SAVE_FAILED', 'SAVE_FAILED'])
  expect(await snapshot(folder)).toEqual(before)
})

test.each(['config.json', `${WEIGHTS}.shards.json`, `${WEIGHTS}.rank-00001-of-00002.safetensors`])(
  'a folder in the place of %s is refused',
  async (name) => {
    const folder = await temporaryFolder()
    await mkdir(join(folder, name))
    expect(codesOf(await saveAt(2, folder, SMALL))).toEqual(['SAVE_TARGET', 'SAVE_TARGET'])
    expect(await readdir(folder)).toEqual([name])
  },
)

test('a degree that does not divide the blocks is refused', async () => {
  const parent = await temporaryFolder()
  expect(codesOf(await saveAt(3, join(parent, 'new'), SMALL))).toEqual(Array(3).fill('BLOCK_NOT_DIVISIBLE'))
  expect(await readdir(parent)).toEqual([])
})

describe('opening refuses', () => {
  const RANK1 = `${WEIGHTS}.rank-00001-of-00002.safetensors`
  const MANIFEST = `${WEIGHTS}.shards.json`

  async function saved(): Promise<string> {
    await skipSync()
    const folder = await temporaryFolder()
    await savedAt(2, folder, SMALL)
    return folder
  }

  async function refuse(folder: string, code: string, ...texts: readonly string[]): Promise<void> {
    await expectCode(() => ShardedCheckpoint.open(folder), code, ...texts)
    expect(await openFiles(folder)).toBe(0)
  }

  test('a folder without a manifest', async () => {
    await refuse(await temporaryFolder(), 'SHARDS_MANIFEST', 'ENOENT')
    const folder = await temporaryFolder()
    await mkdir(join(folder, MANIFEST))
    await refuse(folder, 'SHARDS_MANIFEST', 'not a regular file')
  })

  test('a missing file', async () => {
    const folder = await saved()
    await rm(join(folder, RANK1))
    await refuse(folder, 'CHECKPOINT_FILE_MISSING', RANK1)
  })

  test('the file of another rank', async () => {
    const folder = await saved()
    // At degree 2 both files would have the same size without the norm.
    const tensors = new Map([...SMALL.tensors].filter(([name]) => name !== 'norm'))
    await savedAt(2, folder, { ...SMALL, tensors })
    await copyFile(join(folder, `${WEIGHTS}.rank-00000-of-00002.safetensors`), join(folder, RANK1))
    await refuse(folder, 'SHARDS_FILE', RANK1, 'rank 0')
  })

  test('the file of another save', async () => {
    const [folder, other] = [await saved(), await saved()]
    await copyFile(join(other, RANK1), join(folder, RANK1))
    await refuse(folder, 'SHARDS_FILE', RANK1, 'save_id')
  })

  test('a truncated file', async () => {
    const folder = await saved()
    await truncate(join(folder, RANK1), 300)
    await refuse(folder, 'SHARDS_FILE', RANK1, '300')
  })

  test('a whole checkpoint beside the shards', async () => {
    const folder = await saved()
    await writeFile(join(folder, `${WEIGHTS}.safetensors`), 'whole')
    await expectCode(() => openWeights(folder), 'CHECKPOINT_AMBIGUOUS', MANIFEST)
  })

  type Manifest = {
    version: number
    tp_degree: number
    format: string
    files: { name: string; bytes: number }[]
    parameters: Record<string, { dtype: string; shape: number[]; shard?: { dim: number; blocks: number[] } }>
  }
  const lies: readonly (readonly [what: string, code: string, lie: (manifest: Manifest) => unknown])[] = [
    ['no object', 'SHARDS_MANIFEST', () => []],
    ['another format', 'SHARDS_MANIFEST', (manifest) => ({ ...manifest, format: 'other' })],
    ['a later version', 'SHARDS_VERSION', (manifest) => ({ ...manifest, version: 2, files: 'new' })],
    ['no save id', 'SHARDS_MANIFEST', (manifest) => ({ ...manifest, save_id: '' })],
    ['degree 0', 'SHARDS_MANIFEST', (manifest) => ({ ...manifest, tp_degree: 0, files: [] })],
    ['another degree', 'SHARDS_MANIFEST', (manifest) => ({ ...manifest, tp_degree: 4 })],
    ['a file twice', 'SHARDS_MANIFEST', ({ files, ...rest }) => ({ ...rest, files: [files[0], files[0]] })],
    ['files in another order', 'SHARDS_FILE', ({ files, ...rest }) => ({ ...rest, files: [files[1], files[0]] })],
    [
      'another size',
      'SHARDS_FILE',
      ({ files, ...rest }) => ({ ...rest, files: files.map(({ name }) => ({ name, bytes: 1 })) }),
    ],
    [
      'a file outside the folder',
      'CHECKPOINT_PATH',
      ({ files, ...rest }) => ({ ...rest, files: files.map(({ name, bytes }) => ({ name: `../${name}`, bytes })) }),
    ],
    [
      'a negative size',
      'SHARDS_MANIFEST',
      ({ files, ...rest }) => ({ ...rest, files: files.map(({ name }) => ({ name, bytes: -1 })) }),
    ],
    ['a weight too many', 'SHARDS_FILE', withParameter('more', { dtype: 'float32', shape: [1] })],
    ['another dtype', 'SHARDS_FILE', withParameter('norm', { dtype: 'int32', shape: [3] })],
    ['an unknown dtype', 'SHARDS_MANIFEST', withParameter('norm', { dtype: 'float8', shape: [3] })],
    ['another shape', 'SHARDS_FILE', withParameter('norm', { dtype: 'float32', shape: [3, 1] })],
    ['a negative shape', 'SHARDS_MANIFEST', withParameter('norm', { dtype: 'float32', shape: [-3] })],
    ['a sharded weight as replicated', 'SHARDS_FILE', withParameter('rows', { dtype: 'float32', shape: [8, 2] })],
    [
      'another dim',
      'SHARDS_FILE',
      withParameter('rows', { dtype: 'float32', shape: [8, 2], shard: { dim: 1, blocks: [2] } }),
    ],
    [
      'no such dim',
      'SHARDS_MANIFEST',
      withParameter('rows', { dtype: 'float32', shape: [8, 2], shard: { dim: 2, blocks: [2] } }),
    ],
    [
      'blocks that are too small',
      'SHARDS_MANIFEST',
      withParameter('rows', { dtype: 'float32', shape: [8, 2], shard: { dim: 0, blocks: [4, 2] } }),
    ],
    [
      'blocks that do not divide',
      'SHARDS_MANIFEST',
      withParameter('rows', { dtype: 'float32', shape: [8, 2], shard: { dim: 0, blocks: [3, 5] } }),
    ],
    [
      'no blocks',
      'SHARDS_MANIFEST',
      withParameter('rows', { dtype: 'float32', shape: [8, 2], shard: { dim: 0, blocks: [] } }),
    ],
    [
      'a weight too few',
      'SHARDS_FILE',
      ({ parameters: { norm: _, ...parameters }, ...rest }) => ({ ...rest, parameters }),
    ],
  ]

  function withParameter(name: string, parameter: Manifest['parameters'][string]): (manifest: Manifest) => unknown {
    return (manifest) => ({ ...manifest, parameters: { ...manifest.parameters, [name]: parameter } })
  }

  test.each(lies)('a manifest with %s', async (_, code, lie) => {
    const folder = await saved()
    const path = join(folder, MANIFEST)
    await writeFile(path, JSON.stringify(lie(JSON.parse(await readFile(path, 'utf8')))))
    await refuse(folder, code)
  })

  test('a manifest that is not JSON, or repeats a key', async () => {
    const folder = await saved()
    const path = join(folder, MANIFEST)
    await writeFile(path, '{"format": "rankwise-shards"')
    await refuse(folder, 'SHARDS_MANIFEST', path)
    await writeFile(path, '{"format": "rankwise-shards", "version": 1, "version": 2}')
    await refuse(folder, 'SHARDS_MANIFEST', 'version')
  })
})

describe('reading', () => {
  test('stops when it is aborted, and after closing', async () => {
    const folder = await temporaryFolder()
    await savedAt(2, folder, SMALL)
    await using weights = await ShardedCheckpoint.open(folder)
    const source = weights.source('columns')
    await expectCode(() => source.read({ signal: AbortSignal.abort() }), 'ABORTED')
    expect((await source.read()).data).toEqual(SMALL.tensors.get('columns')?.data)
    await weights[Symbol.asyncDispose]()
    expect(await openFiles(folder)).toBe(0)
    await expectCode(() => source.read(), 'SAFETENSORS_CLOSED')
  })

  test('refuses names and slices that do not exist', async () => {
    const folder = await temporaryFolder()
    await savedAt(1, folder, SMALL)
    await using weights = await ShardedCheckpoint.open(folder)
    await expectCode(() => weights.source('other'), 'TENSOR_NOT_FOUND', 'other')
    await expectCode(() => weights.source('rows', { dim: 2, ranges: [[0, 1]] }), 'SHARD_SLICES')
    await expectCode(() => weights.source('rows', { dim: 0, ranges: [[0, 9]] }), 'SHARD_SLICES')
  })
})

import { truncate } from 'node:fs/promises'
import { join } from 'node:path'
import fc from 'fast-check'
import { describe, expect, onTestFinished, test, vi } from 'vitest'
import type { DeviceTensor, LoadShardOptions } from '../src/backend.ts'
import { Checkpoint, type ShardSource, type TensorInfo, type WeightSource } from '../src/checkpoint/index.ts'
import { ReadStats } from '../src/checkpoint/read-stats.ts'
import { RankwiseError } from '../src/errors.ts'
import { type LoadProgress, type LoadWeightsOptions, loadWeights } from '../src/load-weights.ts'
import { Module } from '../src/module.ts'
import { Parameter } from '../src/parameter.ts'
import { shard, shardSlices } from '../src/placement.ts'
import type { ParameterPlacements } from '../src/plan.ts'
import { ReferenceBackend } from '../src/reference/index.ts'
import { writeSafetensors } from '../src/save/write-safetensors.ts'
import { type Shape, Tensor } from '../src/tensor.ts'
import { expectCode, temporaryFolder } from './checkpoint/files.ts'

const MIB = 2 ** 20

/** A model of these parameters. */
class TestModel extends Module {
  constructor(shapes: Readonly<Record<string, Shape>>) {
    super()
    Object.assign(this, Object.fromEntries(Object.entries(shapes).map(([name, shape]) => [name, new Parameter(shape)])))
  }

  override forward(): void {}
}

/** Keeps what it loads until it is disposed; maps the weights of some names instead of reading them. */
class TestBackend extends ReferenceBackend {
  readonly order: string[] = []
  readonly #mapped: readonly string[]

  constructor({ mapped = [] }: { readonly mapped?: readonly string[] } = {}) {
    super()
    this.#mapped = mapped
  }

  override async loadShard(source: ShardSource, options: LoadShardOptions): Promise<DeviceTensor> {
    this.order.push(source.name)
    const ranges = this.#mapped.includes(source.name) ? source.ranges() : undefined
    if (ranges === undefined) return super.loadShard(source, options)
    return { dtype: source.dtype, shape: source.shape, dispose: () => {} }
  }
}

function optionsFor(backend: TestBackend, overrides: Partial<LoadWeightsOptions> = {}): LoadWeightsOptions {
  return {
    placements: new Map(),
    rank: 0,
    tpDegree: 1,
    backend,
    dtype: 'float32',
    component: 'transformer',
    ignored: [],
    signal: undefined,
    onProgress: undefined,
    ...overrides,
  }
}

function counting(shape: Shape): Tensor {
  const tensor = Tensor.zeros('float32', shape)
  for (const i of tensor.data.keys()) tensor.data[i] = i
  return tensor
}

/** An open checkpoint with a file of these tensors, in this order of names. */
async function checkpointOf(shapes: Readonly<Record<string, Shape>>): Promise<Checkpoint> {
  const folder = await temporaryFolder()
  const path = join(folder, 'diffusion_pytorch_model.safetensors')
  await writeSafetensors(path, new Map(Object.entries(shapes).map(([name, shape]) => [name, counting(shape)])))
  const checkpoint = await Checkpoint.open(folder)
  onTestFinished(() => checkpoint.close())
  return checkpoint
}

function placed(placements: Readonly<Record<string, ReturnType<typeof shard>>>): ParameterPlacements {
  return new Map(Object.entries(placements).map(([name, placement]) => [name, { placement, splitInput: false }]))
}

/** A weight of a checkpoint that is not there: what reading it does. */
interface FakeWeight {
  readonly name: string
  readonly file?: string
  readonly offset?: number
  readonly bytes?: number
  /** What the tensor holds. */
  readonly value?: number
  read(signal: AbortSignal | undefined): Promise<void>
}

class FakeCheckpoint implements WeightSource {
  readonly location = '/fake'
  readonly tensors: ReadonlyMap<string, TensorInfo>
  readonly stats = new ReadStats()
  readonly #weights: readonly FakeWeight[]

  constructor(weights: readonly FakeWeight[]) {
    this.#weights = weights
    this.tensors = new Map(
      weights.map(({ name, file = '/fake/a', offset = 0, bytes = 4 }) => [
        name,
        { name, dtype: 'float32', shape: [1], file, byteOffset: offset, byteLength: bytes },
      ]),
    )
  }

  source(name: string): ShardSource {
    const { byteLength, file } = this.tensors.get(name) as TensorInfo
    return {
      name,
      file,
      dtype: 'float32',
      fullShape: [1],
      slices: undefined,
      shape: [1],
      byteLength,
      ranges: () => undefined,
      read: async ({ signal } = {}) => {
        const weight = this.#weights.find((candidate) => candidate.name === name)
        await weight?.read(signal)
        return Tensor.float32([1], [weight?.value ?? 0])
      },
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {}
}

function modelOf(weights: readonly FakeWeight[]): TestModel {
  return new TestModel(Object.fromEntries(weights.map(({ name }) => [name, [1]])))
}

const after = (milliseconds: number) => new Promise((resolve) => setTimeout(resolve, milliseconds))

describe('what is loaded', () => {
  test("is this rank's shard of every weight, under the names and in the order of the model", async () => {
    const shapes = { rows: [4, 2], whole: [3], columns: [2, 4] } as const
    const placements = placed({ rows: shard(0, [4]), columns: shard(1, [4]) })
    const backend = new TestBackend()
    const { weights, report } = await loadWeights(
      await checkpointOf(shapes),
      new TestModel(shapes),
      optionsFor(backend, { placements, rank: 1, tpDegree: 2 }),
    )
    expect([...weights.keys()]).toEqual(['rows', 'whole', 'columns'])
    const values = async (name: string) => [...(await backend.download(weights.get(name) as DeviceTensor)).data]
    expect(await values('rows')).toEqual([4, 5, 6, 7])
    expect(await values('whole')).toEqual([0, 1, 2])
    expect(await values('columns')).toEqual([2, 3, 6, 7])
    const bytes = 4 * (4 + 3 + 4)
    expect(report).toMatchObject({ localBytes: bytes, readBytes: bytes, mappedBytes: 0, fullBytes: 4 * (8 + 3 + 8) })
    expect(report.largestBuffers.get('columns')).toBe(16)
  })

  test('tells mapped bytes from read ones', async () => {
    const shapes = { rows: [4, 2], whole: [3], columns: [2, 4] } as const
    const placements = placed({ rows: shard(0, [4]), columns: shard(1, [4]) })
    const backend = new TestBackend({ mapped: ['rows', 'whole', 'columns'] })
    const options = optionsFor(backend, { placements, rank: 1, tpDegree: 2 })
    const checkpoint = await checkpointOf(shapes)
    const { report } = await loadWeights(checkpoint, new TestModel(shapes), options)
    // Columns are strided, so the backend has to read them.
    const { largestBuffers, ...figures } = report
    const expected = { localBytes: 44, fullBytes: 76, readBytes: 16, mappedBytes: 28 }
    expect(JSON.parse(JSON.stringify(figures))).toEqual(expected)
    expect(largestBuffers).toEqual(new Map([['columns', 16]]))
    // What another load has read before does not count.
    expect((await loadWeights(checkpoint, new TestModel(shapes), options)).report).toMatchObject(expected)
  })

  test('is read in the order of the files', async () => {
    const read = async () => {}
    const weights = [
      { name: 'd', file: '/fake/b', offset: 8, read },
      { name: 'a', file: '/fake/a', offset: 24, read },
      { name: 'c', file: '/fake/b', offset: 0, read },
      { name: 'b', file: '/fake/a', offset: 8, read },
    ]
    const backend = new TestBackend()
    const loaded = await loadWeights(new FakeCheckpoint(weights), modelOf(weights), optionsFor(backend))
    expect(backend.order).toEqual(['b', 'a', 'c', 'd'])
    expect([...loaded.weights.keys()]).toEqual(['d', 'a', 'c', 'b'])
  })

  test('is loaded a few at a time, and few bytes at a time', async () => {
    let [reading, most, bytesReading] = [0, 0, 0]
    const sizes = [...Array(20).fill(4), 100 * MIB, ...Array(8).fill(20 * MIB), 70 * MIB] as number[]
    const weights = sizes.map((bytes, i) => ({
      name: `w${i}`,
      offset: i,
      bytes,
      read: async () => {
        reading++
        bytesReading += bytes
        most = Math.max(most, reading)
        expect(reading).toBeLessThanOrEqual(4)
        if (reading > 1) expect(bytesReading).toBeLessThanOrEqual(64 * MIB)
        await after(1)
        reading--
        bytesReading -= bytes
      },
    }))
    await loadWeights(new FakeCheckpoint(weights), modelOf(weights), optionsFor(new TestBackend()))
    expect(most).toBe(4)
  })

  test('is right whichever comes first', async () => {
    const weights = Array.from({ length: 9 }, (_, i) => ({
      name: `w${i}`,
      offset: i,
      value: i,
      read: async () => void (await after((i * 7) % 5)),
    }))
    const backend = new TestBackend()
    const loaded = await loadWeights(new FakeCheckpoint(weights), modelOf(weights), optionsFor(backend))
    const values = await Promise.all([...loaded.weights.values()].map((weight) => backend.download(weight)))
    expect(values.map(({ data }) => data[0])).toEqual([0, 1, 2, 3, 4, 5, 6, 7, 8])
  })

  test('is told with a total, never less than before', async () => {
    const weights = Array.from({ length: 12 }, (_, i) => ({
      name: `w${i}`,
      bytes: 10 * (i + 1),
      read: async () => void (await after((i * 7) % 5)),
    }))
    const events: LoadProgress[] = []
    const onProgress = (event: LoadProgress) => void events.push(event)
    await loadWeights(new FakeCheckpoint(weights), modelOf(weights), optionsFor(new TestBackend(), { onProgress }))
    expect(events).toHaveLength(12)
    expect(events.every(({ component, totalBytes }) => component === 'transformer' && totalBytes === 780)).toBe(true)
    const bytes = events.map(({ loadedBytes }) => loadedBytes)
    expect(bytes).toEqual([...new Set(bytes)].sort((a, b) => a - b))
    expect(bytes.at(-1)).toBe(780)
  })
})

describe('a load that fails', () => {
  test('fails before the first read where the backend has no room for all shards', async () => {
    const checkpoint = await checkpointOf({ a: [4], b: [6, 2] })
    class SmallBackend extends TestBackend {
      requireRoom(sources: readonly ShardSource[]): void {
        const bytes = sources.reduce((sum, { byteLength }) => sum + byteLength, 0)
        throw new RankwiseError('BACKEND_MEMORY', `no room for ${bytes} bytes`)
      }
    }
    const backend = new SmallBackend()
    const options = optionsFor(backend, { placements: placed({ b: shard(0, [6]) }), tpDegree: 2 })
    const loading = loadWeights(checkpoint, new TestModel({ a: [4], b: [6, 2] }), options)
    await expect(loading).rejects.toThrow('no room for 40 bytes')
    expect(backend.order).toEqual([])
  })

  test('frees everything and reports the first error in order, whenever it comes', async () => {
    const weight = fc.record({ fails: fc.boolean(), delay: fc.nat({ max: 4 }), bytes: fc.constantFrom(4, 40 * MIB) })
    await fc.assert(
      fc.asyncProperty(fc.array(weight, { minLength: 1, maxLength: 12 }), async (cases) => {
        let reading = 0
        const weights = cases.map(({ fails, delay, bytes }, i) => ({
          name: `w${i}`,
          offset: i,
          bytes,
          read: async () => {
            reading++
            await after(delay)
            reading--
            if (fails) throw new RankwiseError('BROKEN', `w${i}`)
          },
        }))
        const backend = new TestBackend()
        const load = loadWeights(new FakeCheckpoint(weights), modelOf(weights), optionsFor(backend))
        const first = cases.findIndex(({ fails }) => fails)
        if (first < 0) {
          expect((await load).weights.size).toBe(cases.length)
        } else {
          await expectCode(() => load, 'BROKEN', `w${first}`)
          expect(backend.memory().weightBytes).toBe(0)
        }
        expect(reading).toBe(0)
      }),
      { numRuns: 100 },
    )
  })

  test('begins no other weight', async () => {
    const weights = Array.from({ length: 20 }, (_, i) => ({
      name: `w${i}`,
      offset: i,
      read: async () => {
        await after(1)
        if (i === 2) throw new RankwiseError('BROKEN', 'w2')
      },
    }))
    const backend = new TestBackend()
    const load = loadWeights(new FakeCheckpoint(weights), modelOf(weights), optionsFor(backend))
    await expectCode(() => load, 'BROKEN', 'w2')
    expect(backend.order.length).toBeLessThanOrEqual(6)
  })

  test('of a file that became shorter, frees everything and names the tensor', async () => {
    const shapes = { a: [1000], b: [1000], c: [1000] } as const
    const checkpoint = await checkpointOf(shapes)
    const info = checkpoint.tensors.get('b') as TensorInfo
    await truncate(info.file, info.byteOffset + 10)
    const backend = new TestBackend()
    await expectCode(
      () => loadWeights(checkpoint, new TestModel(shapes), optionsFor(backend)),
      'SAFETENSORS_TRUNCATED',
      info.file,
      '"b"',
    )
    expect(backend.memory().weightBytes).toBe(0)
  })

  test('in its progress callback frees everything', async () => {
    const shapes = { a: [10], b: [10], c: [10] } as const
    const backend = new TestBackend()
    const onProgress = () => {
      throw new Error('no terminal')
    }
    const load = loadWeights(await checkpointOf(shapes), new TestModel(shapes), optionsFor(backend, { onProgress }))
    await expect(load).rejects.toThrow('no terminal')
    expect(backend.memory().weightBytes).toBe(0)
  })

  test('because it is aborted, stops at once and frees everything', async () => {
    const controller = new AbortController()
    const weights = Array.from({ length: 40 }, (_, i) => ({
      name: `w${i}`,
      offset: i,
      read: async (signal: AbortSignal | undefined) => {
        await after(5)
        if (signal?.aborted) throw new RankwiseError('ABORTED', `w${i}`)
        if (i === 10) controller.abort(new Error('enough'))
      },
    }))
    const backend = new TestBackend()
    const { signal } = controller
    const load = loadWeights(new FakeCheckpoint(weights), modelOf(weights), optionsFor(backend, { signal }))
    await expectCode(() => load, 'ABORTED')
    expect(backend.order.length).toBeLessThan(16)
    expect(backend.memory().weightBytes).toBe(0)

    const idle = new TestBackend()
    const late = loadWeights(new FakeCheckpoint(weights), modelOf(weights), optionsFor(idle, { signal }))
    await expectCode(() => late, 'ABORTED')
    expect(idle.order).toEqual([])
  })
})

describe('names', () => {
  const warnings = () => {
    const warn = vi.spyOn(process, 'emitWarning').mockImplementation(() => {})
    onTestFinished(() => warn.mockRestore())
    return warn
  }

  test('that are missing are all listed', async () => {
    const checkpoint = await checkpointOf({ a: [1] })
    const model = new TestModel({ a: [1], b: [1], c: [1] })
    const load = loadWeights(checkpoint, model, optionsFor(new TestBackend(), { tied: { b: 'c' } }))
    await expectCode(() => load, 'WEIGHTS_MISSING', checkpoint.location, 'lacks 2 weights', '[b, c]')
    expect(checkpoint.stats.bytesRead).toBe(0)
  })

  test('that the model does not use are warned of, unless they are ignored', async () => {
    const warn = warnings()
    const checkpoint = await checkpointOf({ a: [1], x: [1], y: [1], 'ema.a': [1] })
    await loadWeights(checkpoint, new TestModel({ a: [1] }), optionsFor(new TestBackend(), { ignored: [/^ema\./] }))
    expect(warn).toHaveBeenCalledExactlyOnceWith(
      'transformer: the checkpoint has weights the model does not use: x, y',
      { code: 'WEIGHTS_UNEXPECTED' },
    )
    expect(checkpoint.stats.bytesRead).toBe(4)
  })

  test.each([
    ['the target', { embed: [2, 2] }, 'embed'],
    ['the alias', { head: [2, 2] }, 'head'],
  ] as const)('that are tied share the tensor of %s', async (_, stored, name) => {
    const warn = warnings()
    const backend = new TestBackend()
    const { weights, report } = await loadWeights(
      await checkpointOf(stored),
      new TestModel({ head: [2, 2], embed: [2, 2] }),
      optionsFor(backend, { tied: { head: 'embed' } }),
    )
    expect([...weights.keys()]).toEqual(['head', 'embed'])
    expect(weights.get('head')).toBe(weights.get('embed'))
    expect(backend.order).toEqual([name])
    expect(report).toMatchObject({ localBytes: 16, fullBytes: 16, readBytes: 16 })
    expect(warn).not.toHaveBeenCalled()
  })

  test('of an alias that is no parameter are no surprise', async () => {
    const warn = warnings()
    const options = optionsFor(new TestBackend(), { tied: { head: 'embed' } })
    await loadWeights(await checkpointOf({ head: [1] }), new TestModel({ embed: [1] }), options)
    expect(warn).not.toHaveBeenCalled()
  })

  test('that are tied to a third find its other aliases', async () => {
    const model = new TestModel({ a: [1], b: [1], target: [1] })
    const options = optionsFor(new TestBackend(), { tied: { a: 'target', b: 'target' } })
    const { weights } = await loadWeights(await checkpointOf({ b: [1] }), model, options)
    expect(new Set(weights.values()).size).toBe(1)
  })

  test('that are tied and both stored are loaded as they are', async () => {
    const backend = new TestBackend()
    const shapes = { head: [2, 2], embed: [2, 2] } as const
    const options = optionsFor(backend, { tied: { head: 'embed' } })
    const { report } = await loadWeights(await checkpointOf(shapes), new TestModel(shapes), options)
    expect(backend.order.sort()).toEqual(['embed', 'head'])
    expect(report).toMatchObject({ localBytes: 32, fullBytes: 32 })
  })

  test('that are tied and placed differently have shards of their own', async () => {
    const backend = new TestBackend()
    const { weights, report } = await loadWeights(
      await checkpointOf({ embed: [2, 2] }),
      new TestModel({ head: [2, 2], embed: [2, 2] }),
      optionsFor(backend, {
        tied: { head: 'embed' },
        placements: placed({ head: shard(0, [2]) }),
        rank: 1,
        tpDegree: 2,
      }),
    )
    expect(weights.get('head')?.shape).toEqual([1, 2])
    expect(weights.get('embed')?.shape).toEqual([2, 2])
    expect(report).toMatchObject({ localBytes: 24, fullBytes: 16 })
  })

  test('of a tied weight are checked against the shape of every parameter', async () => {
    const options = optionsFor(new TestBackend(), { tied: { head: 'embed' } })
    const model = new TestModel({ head: [2, 3], embed: [2, 2] })
    const load = loadWeights(await checkpointOf({ embed: [2, 2] }), model, options)
    await expectCode(() => load, 'WEIGHTS_SHAPE', 'embed', '[2, 2]', '[2, 3]')
  })
})

describe('a checkpoint that does not fit', () => {
  test('in a shape is refused before anything is read', async () => {
    const checkpoint = await checkpointOf({ a: [4], b: [2, 4] })
    const model = new TestModel({ a: [4], b: [4, 4] })
    // At degree 2, rank 0 of the model would take as many rows as the checkpoint has.
    expect(shardSlices(shard(0, [4]), 0, 2)?.ranges).toEqual([[0, 2]])
    const options = optionsFor(new TestBackend(), { placements: placed({ b: shard(0, [4]) }), tpDegree: 2 })
    await expectCode(() => loadWeights(checkpoint, model, options), 'WEIGHTS_SHAPE', 'b', '[2, 4]', '[4, 4]')
    expect(checkpoint.stats.bytesRead).toBe(0)
  })

  test('in its dtype is refused before anything is read', async () => {
    const folder = await temporaryFolder()
    const path = join(folder, 'diffusion_pytorch_model.safetensors')
    await writeSafetensors(path, new Map([['a', Tensor.zeros('int8', [4])]]))
    await using checkpoint = await Checkpoint.open(folder)
    const load = loadWeights(checkpoint, new TestModel({ a: [4] }), optionsFor(new TestBackend()))
    await expectCode(() => load, 'WEIGHTS_DTYPE', 'a', 'int8')
    expect(checkpoint.stats.bytesRead).toBe(0)
  })
})

import { execFile } from 'node:child_process'
import { readFileSync, truncateSync } from 'node:fs'
import { mkdtemp, open, rename, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { normal, opGraph, segmentOf } from '@rankwise/conformance'
import {
  type ByteRange,
  Checkpoint,
  type DeviceTensor,
  itemSize,
  type ShardSource,
  shard,
  shardSlices,
  sizeOf,
  Tensor,
  writeSafetensors,
} from '@rankwise/core'
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { OrtBackend } from '../src/backend.ts'
import { selectEngine } from '../src/engine/engine-selection.ts'
import { FileMapper, MAX_MAPPED_BYTES } from '../src/file-mapper.ts'
import { HostDevice } from '../src/host-device.ts'
import { ort, type WeightsMode } from '../src/index.ts'
import { loadNativeMemory } from '../src/native-memory.ts'
import { WeightLoader } from '../src/weight-loader.ts'
import type { WeightTensor } from '../src/weight-tensor.ts'

const WEIGHTS = {
  packed: normal([20, 6], 1).cast('bfloat16'),
  half: normal([4, 3], 2).cast('float16'),
  full: normal([5], 3),
  double: normal([3, 2], 4).cast('float64'),
  empty: Tensor.zeros('bfloat16', [0, 4]),
  row: normal([1, 8], 5).cast('bfloat16'),
} as const

let directory: string
let checkpoint: Checkpoint
beforeEach(async () => {
  directory = await mkdtemp(join(tmpdir(), 'rankwise-mapping-'))
  await writeSafetensors(weightsFile(), new Map<string, Tensor>(Object.entries(WEIGHTS)))
  checkpoint = await Checkpoint.open(directory)
})
afterEach(async () => {
  await checkpoint.close()
  await rm(directory, { recursive: true })
})

const weightsFile = () => join(directory, 'diffusion_pytorch_model.safetensors')

const load = (backend: OrtBackend, source: ShardSource) =>
  backend.loadShard(source, { dtype: 'float32' }) as Promise<WeightTensor>

/** Mappings of files in the folder of the test that this process has now. */
function mappings(): readonly string[] {
  const lines = readFileSync('/proc/self/maps', 'utf8').split('\n')
  return lines.filter((line) => line.includes(directory))
}

async function valuesOf(backend: OrtBackend, weight: DeviceTensor): Promise<readonly number[]> {
  return [...(await backend.download(weight)).cast('float32').data]
}

/** A source of a whole tensor at any offset of a file. */
function sourceAt(file: string, offset: number, tensor: Tensor): ShardSource {
  const { dtype, shape, byteLength } = tensor
  return {
    ...{ name: 'tensor', file, dtype, fullShape: shape, slices: undefined, shape, byteLength },
    ranges: () => [{ offset, length: byteLength }],
    read: async () => tensor,
  }
}

const bytesOf = ({ data }: Tensor) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength)

/** A backend whose system refuses to map. */
async function refusing(mode: WeightsMode, error: string): Promise<OrtBackend> {
  const native = { pageBytes: 4096, map: () => error, unmap: () => {}, view: () => new ArrayBuffer(0) }
  const { engine, selection } = await selectEngine('auto', { threads: 1, pinThreads: false })
  return new OrtBackend(new HostDevice(engine, new WeightLoader(mode, new FileMapper(native))), selection)
}

describe('where weights lie', () => {
  it.each(['auto', 'mapped'] as const)('%s: consecutive ones in the file, others in memory', async (weights) => {
    await using backend = await ort({ device: 'cpu', weights })
    const slices = shardSlices(shard(0, [8, 12]), 1, 2)
    const packed = await load(backend, checkpoint.source('packed', slices))
    expect(packed).toMatchObject({ dtype: 'bfloat16', shape: [10, 6], storage: 'bfloat16 4|6', isMapped: true })
    expect(backend.memory()).toMatchObject({ weightBytes: 0, mappedBytes: packed.byteLength })
    const columns = await load(backend, checkpoint.source('packed', shardSlices(shard(1, [6]), 0, 2)))
    expect(columns).toMatchObject({ dtype: 'bfloat16', shape: [20, 3], storage: 'bfloat16', isMapped: false })
    expect(backend.memory()).toMatchObject({ weightBytes: columns.byteLength, mappedBytes: packed.byteLength })
    expect(await valuesOf(backend, packed)).toEqual([
      ...WEIGHTS.packed.cast('float32').data.slice(4 * 6, 8 * 6),
      ...WEIGHTS.packed.cast('float32').data.slice(14 * 6),
    ])
  })

  it('read: all in memory, in the dtype of the file', async () => {
    await using backend = await ort({ device: 'cpu', weights: 'read' })
    const packed = await load(backend, checkpoint.source('packed', shardSlices(shard(0, [8, 12]), 1, 2)))
    expect(packed).toMatchObject({ storage: 'bfloat16', isMapped: false, byteLength: 10 * 6 * 2 })
    expect(mappings()).toEqual([])
  })

  it.each(['auto', 'read'] as const)('%s: what is downloaded is what is stored', async (weights) => {
    await using backend = await ort({ device: 'cpu', weights })
    for (const name of ['packed', 'half', 'full', 'empty', 'row'] as const) {
      const { dtype, shape, data } = await backend.download(await load(backend, checkpoint.source(name)))
      expect({ dtype, shape, data: [...data] }).toEqual({ ...WEIGHTS[name], data: [...WEIGHTS[name].data] })
    }
  })

  it('is refused when it is nowhere', async () => {
    const creating = ort({ device: 'cpu', weights: 'gpu' as WeightsMode })
    await expect(creating).rejects.toMatchObject({ code: 'BACKEND_WEIGHTS', actual: { weights: 'gpu' } })
  })
})

describe('a mapped weight', () => {
  it('outlives the checkpoint and the name of its file', async () => {
    await using backend = await ort({ device: 'cpu', weights: 'mapped' })
    const weight = await load(backend, checkpoint.source('packed'))
    await checkpoint.close()
    await rm(weightsFile())
    expect(await valuesOf(backend, weight)).toEqual([...WEIGHTS.packed.cast('float32').data])
  })

  it('is not that of a file that takes the place of its own', async () => {
    await using backend = await ort({ device: 'cpu', weights: 'mapped' })
    const first = await load(backend, checkpoint.source('half'))
    const other = Object.fromEntries(Object.entries(WEIGHTS).map(([name, weight]) => [name, weight.clone()]))
    other.half?.data.reverse()
    await writeSafetensors(`${weightsFile()}.new`, new Map(Object.entries(other)))
    await rename(`${weightsFile()}.new`, weightsFile())
    const second = await load(backend, checkpoint.source('half'))
    expect(await valuesOf(backend, first)).toEqual([...WEIGHTS.half.cast('float32').data])
    expect(await valuesOf(backend, second)).toEqual([...WEIGHTS.half.cast('float32').data].reverse())
  })

  it('shares its mapping, which ends with the last weight in it', async () => {
    await using backend = await ort({ device: 'cpu', weights: 'mapped' })
    const weights = await Promise.all(
      (['packed', 'half', 'full'] as const).map((name) => load(backend, checkpoint.source(name))),
    )
    expect(mappings()).toHaveLength(1)
    weights[0]?.dispose()
    weights[1]?.dispose()
    weights[1]?.dispose()
    expect(mappings()).toHaveLength(1)
    expect(await valuesOf(backend, weights[2] as DeviceTensor)).toEqual([...WEIGHTS.full.data])
    weights[2]?.dispose()
    expect(mappings()).toEqual([])
    expect(backend.memory()).toMatchObject({ mappedBytes: 0 })
  })

  it('ends with its backend', async () => {
    const backend = await ort({ device: 'cpu', weights: 'mapped' })
    const weight = await load(backend, checkpoint.source('packed'))
    await backend.dispose()
    expect(mappings()).toEqual([])
    await expect(backend.download(weight)).rejects.toMatchObject({ code: 'TENSOR_DISPOSED' })
    await expect(load(backend, checkpoint.source('packed'))).rejects.toMatchObject({ code: 'BACKEND_DISPOSED' })
  })

  it('that is loading when its backend ends is not left behind', async () => {
    const backend = await ort({ device: 'cpu', weights: 'mapped' })
    const refused = expect(load(backend, checkpoint.source('packed'))).rejects.toMatchObject({
      code: 'BACKEND_DISPOSED',
    })
    await backend.dispose()
    await refused
    expect(mappings()).toEqual([])
    expect(backend.memory()).toMatchObject({ mappedBytes: 0 })
  })

  it('is used no more once it is disposed', async () => {
    await using backend = await ort({ device: 'cpu', weights: 'mapped' })
    const [weight, executable, x] = await product(backend)
    weight.dispose()
    await expect(executable.run([x], [weight])).rejects.toMatchObject({ code: 'TENSOR_DISPOSED' })
    await expect(backend.download(weight)).rejects.toMatchObject({ code: 'TENSOR_DISPOSED' })
    expect(() => weight.rows(0, 1)).toThrow(expect.objectContaining({ code: 'TENSOR_DISPOSED' }))
  })

  it('that is disposed during a run stays until the run has ended', async () => {
    await using backend = await ort({ device: 'cpu', weights: 'mapped' })
    const [weight, executable, x] = await product(backend)
    const [expected] = await executable.run([x], [weight])
    const running = [executable.run([x], [weight]), executable.run([x], [weight])]
    weight.dispose()
    expect(mappings()).toHaveLength(1)
    for (const run of running) {
      const [result] = await run
      expect(await valuesOf(backend, result as DeviceTensor)).toEqual(await valuesOf(backend, expected as DeviceTensor))
    }
    expect(mappings()).toEqual([])
  })

  it('of a run that fails goes as well', async () => {
    await using backend = await ort({ device: 'cpu', weights: 'mapped' })
    const graph = opGraph('embedding', [Tensor.int32([1], [0]), { dtype: 'float32', shape: [20, 6] }], {}, [1])
    const weight = await load(backend, checkpoint.source('packed'))
    const executable = await backend.compile(segmentOf(graph), [weight])
    const running = executable.run([backend.upload(Tensor.int32([1], [99]))], [weight])
    weight.dispose()
    await expect(running).rejects.toMatchObject({ code: 'ORT_RUN' })
    expect(mappings()).toEqual([])
  })
})

/** The weight 'packed', an executable that multiplies by it, and what it multiplies. */
async function product(backend: OrtBackend) {
  const weight = await load(backend, checkpoint.source('packed'))
  const graph = opGraph('linear', [normal([3, 6], 0), { dtype: 'float32', shape: weight.shape }], {}, [1])
  const executable = await backend.compile(segmentOf(graph), [weight])
  return [weight, executable, backend.upload(normal([3, 6], 0))] as const
}

interface Unmappable {
  readonly what: string
  readonly source: () => ShardSource | Promise<ShardSource>
  readonly values: Tensor
  readonly reason: string
}

const columnBlocks = () => checkpoint.source('row', shardSlices(shard(1, [4, 4]), 1, 2))

const UNMAPPABLE: readonly Unmappable[] = [
  ...([1, 3] as const).map((offset) => ({
    what: `bfloat16 at offset ${offset}`,
    source: () => unalignedSource(offset, WEIGHTS.packed),
    values: WEIGHTS.packed,
    reason: `its offset ${offset} is not a multiple of the 2 bytes of bfloat16`,
  })),
  {
    what: 'float32 at offset 2',
    source: () => unalignedSource(2, WEIGHTS.full),
    values: WEIGHTS.full,
    reason: 'its offset 2 is not a multiple of the 4 bytes of float32',
  },
  {
    what: 'float64',
    source: () => checkpoint.source('double'),
    values: WEIGHTS.double,
    reason: 'it is stored in float64 and has to be cast to float32',
  },
  {
    what: 'ranges within a row',
    source: columnBlocks,
    values: Tensor.float32(
      [1, 4],
      [2, 3, 6, 7].map((i) => WEIGHTS.row.cast('float32').data[i] as number),
    ),
    reason: `its ranges are not whole rows of at most ${MAX_MAPPED_BYTES} bytes`,
  },
  {
    what: 'a file that is gone',
    source: () => sourceAt(join(directory, 'gone'), 0, WEIGHTS.packed),
    values: WEIGHTS.packed,
    reason: 'the file cannot be opened',
  },
  {
    what: 'a file that has become too short',
    source: () => {
      truncateSync(weightsFile(), 64)
      return { ...checkpoint.source('packed'), read: async () => WEIGHTS.packed }
    },
    values: WEIGHTS.packed,
    reason: 'the file ends before the tensor does',
  },
  {
    what: 'a file of a device that maps nothing',
    source: () => sourceAt('/sys/kernel/mm/transparent_hugepage/enabled', 0, WEIGHTS.packed),
    values: WEIGHTS.packed,
    reason: 'mmap failed with ENODEV',
  },
]

async function unalignedSource(offset: number, tensor: Tensor): Promise<ShardSource> {
  const file = join(directory, 'unaligned')
  await writeFile(file, new Uint8Array([...new Uint8Array(offset), ...bytesOf(tensor)]))
  return sourceAt(file, offset, tensor)
}

describe('what cannot be mapped', () => {
  it.each(UNMAPPABLE)('is read: $what', async ({ source, values }) => {
    await using backend = await ort({ device: 'cpu' })
    const weight = await load(backend, await source())
    expect(await valuesOf(backend, weight)).toEqual([...values.cast('float32').data])
    expect(backend.memory()).toMatchObject({ weightBytes: weight.byteLength, mappedBytes: 0 })
    expect(weight.dtype).toBe(values === WEIGHTS.double ? 'float32' : weight.dtype)
    expect(mappings()).toEqual([])
  })

  it.each(UNMAPPABLE)('is an error where weights must be mapped: $what', async ({ source, reason }) => {
    await using backend = await ort({ device: 'cpu', weights: 'mapped' })
    const loading = load(backend, await source())
    await expect(loading).rejects.toMatchObject({ code: 'BACKEND_MAPPING', actual: { reason } })
    expect(backend.memory()).toMatchObject({ weightBytes: 0, mappedBytes: 0 })
    expect(mappings()).toEqual([])
  })

  it.each(['ENOMEM', 'EACCES'])('because of %s is read, or an error', async (error) => {
    await using reading = await refusing('auto', error)
    const weight = await load(reading, checkpoint.source('packed'))
    expect(await valuesOf(reading, weight)).toEqual([...WEIGHTS.packed.cast('float32').data])
    await using mapping = await refusing('mapped', error)
    await expect(load(mapping, checkpoint.source('packed'))).rejects.toMatchObject({
      code: 'BACKEND_MAPPING',
      actual: { reason: `mmap failed with ${error}` },
    })
  })

  it('leaves nothing behind of the ranges before it', async () => {
    const mapper = new FileMapper(await loadNativeMemory())
    const ranges: readonly ByteRange[] = [
      { offset: 0, length: 8 },
      { offset: 8, length: 2 ** 20 },
    ]
    await expect(mapper.map(weightsFile(), ranges)).rejects.toMatchObject({ code: 'BACKEND_MAPPING' })
    expect(mappings()).toEqual([])
  })
})

describe('where nothing can be mapped', () => {
  it('is another platform', async () => {
    await expect(loadNativeMemory('win32')).rejects.toMatchObject({ code: 'BACKEND_MAPPING', where: 'win32' })
  })

  it('is without koffi', async () => {
    vi.doMock('koffi', () => {
      throw new Error('no binary for this machine')
    })
    try {
      await expect(ort({ device: 'cpu', weights: 'mapped' })).rejects.toMatchObject({
        code: 'BACKEND_MAPPING',
        where: 'koffi',
        cause: expect.any(Error),
      })
      await using backend = await ort({ device: 'cpu' })
      const weight = await load(backend, checkpoint.source('packed'))
      expect(await valuesOf(backend, weight)).toEqual([...WEIGHTS.packed.cast('float32').data])
      expect(backend.memory()).toMatchObject({ weightBytes: weight.byteLength, mappedBytes: 0 })
    } finally {
      vi.doUnmock('koffi')
    }
  })
})

/** Creates a file of `size` bytes that takes no room on the disk, with `numbers` at some of its offsets. */
async function sparseFile(size: number, numbers: ReadonlyMap<number, number>): Promise<string> {
  const file = join(directory, 'sparse')
  const handle = await open(file, 'w')
  await handle.truncate(size)
  for (const [offset, value] of numbers) await handle.write(Uint16Array.of(value), 0, 2, offset)
  await handle.close()
  return file
}

function sparseSource(file: string, offset: number, shape: readonly number[]): ShardSource {
  const byteLength = sizeOf(shape) * itemSize('bfloat16')
  return {
    ...{ name: 'tensor', file, dtype: 'bfloat16', fullShape: shape, slices: undefined, shape, byteLength },
    ranges: () => [{ offset, length: byteLength }],
    read: () => Promise.reject(new Error('was read')),
  }
}

describe('large files', () => {
  it('are mapped beyond 4 GiB', async () => {
    const [offset, rows, width] = [3 * 2 ** 31 - 4096, 1024, 2048]
    const last = offset + (rows * width - 1) * 2
    const file = await sparseFile(
      offset + rows * width * 2,
      new Map([
        [offset, 11],
        [last, 22],
      ]),
    )
    await using backend = await ort({ device: 'cpu', weights: 'mapped' })
    const weight = await load(backend, sparseSource(file, offset, [rows, width]))
    expect(weight.storage).toBe('bfloat16')
    const { data } = weight.rows(0, rows)
    expect([data[0], data.at(-1)]).toEqual([11, 22])
  })

  it('may hold weights beyond 4 GiB, which lie in several pieces', async () => {
    const [offset, rows, width] = [1000, 2 ** 20 + 1, 2048]
    const at = (row: number) => offset + row * width * 2
    const pieceRows = Math.floor(MAX_MAPPED_BYTES / (width * 2))
    const marked = [0, pieceRows - 1, pieceRows, 2 * pieceRows, rows - 1]
    const file = await sparseFile(at(rows), new Map(marked.map((row) => [at(row), row % 65_536])))
    await using backend = await ort({ device: 'cpu', weights: 'mapped' })
    const weight = await load(backend, sparseSource(file, offset, [rows, width]))
    expect(weight.layout.pieces).toEqual([pieceRows, pieceRows, rows - 2 * pieceRows])
    expect(marked.map((row) => weight.rows(row, row + 1).data[0])).toEqual(marked.map((row) => row % 65_536))
    expect(() => weight.rows(pieceRows - 1, pieceRows + 1)).toThrow(expect.objectContaining({ code: 'WEIGHT_ROWS' }))
    // A window begins every 2 GiB and is 4 GiB long.
    expect(mappings()).toHaveLength(2)
  })
})

describe('memory', () => {
  const COUNT = 10
  const BYTES = 20 * 2 ** 20

  /** What a process that loads 200 MB of weights takes. */
  async function cost(weights: WeightsMode): Promise<Record<'peak' | 'weightBytes' | 'mappedBytes', number>> {
    const script = fileURLToPath(new URL('workers/load-weights.ts', import.meta.url))
    const flags = ['--expose-gc', '--import', 'tsx', '--conditions=@rankwise/source']
    const cwd = fileURLToPath(new URL('../../..', import.meta.url))
    const { stdout } = await promisify(execFile)(process.execPath, [...flags, script, directory, weights], { cwd })
    return JSON.parse(stdout)
  }

  it('is that of the file, not of the process', async () => {
    const weight = new Tensor('bfloat16', [BYTES / 4096, 2048], new Uint16Array(BYTES / 2).fill(0x3f80))
    const weights = Array.from({ length: COUNT }, (_, i) => [`weight.${i}`, weight] as const)
    await writeSafetensors(weightsFile(), new Map(weights))
    const mapped = await cost('auto')
    expect(mapped).toMatchObject({ weightBytes: 0, mappedBytes: COUNT * BYTES })
    expect(mapped.peak).toBeLessThan(20 * 2 ** 20)
    const read = await cost('read')
    expect(read).toMatchObject({ weightBytes: COUNT * BYTES, mappedBytes: 0 })
    expect(read.peak).toBeGreaterThan(0.9 * COUNT * BYTES)
  })
})

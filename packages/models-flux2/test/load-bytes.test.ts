import { mkdtemp, open, readdir, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import {
  byteSizeOf,
  Checkpoint,
  type DeviceTensor,
  type DType,
  type LoadReport,
  loadWeights,
  localShape,
  REPLICATED,
  readConfig,
  resolvePlan,
  type ShardSource,
} from '@rankwise/core'
import { ReferenceBackend } from '@rankwise/core/reference'
import { directory as demo } from '@rankwise/demo-flux2'
import { referencePath } from '@rankwise/fixtures'
import { describe, expect, it, onTestFinished } from 'vitest'
import { Flux2Transformer2DModel } from '../src/index.ts'

/** Reads what cannot be mapped and forgets it, as the widths of a real model are more than a test should hold. */
class MappingBackend extends ReferenceBackend {
  override async loadShard(source: ShardSource): Promise<DeviceTensor> {
    const ranges = source.ranges()
    if (ranges === undefined) await source.read()
    else expect(ranges.reduce((sum, { length }) => sum + length, 0)).toBe(source.byteLength)
    return { dtype: source.dtype, shape: source.shape, dispose: () => {} }
  }
}

/** Reads everything. */
class ReadingBackend extends ReferenceBackend {
  override async loadShard(source: ShardSource): Promise<DeviceTensor> {
    await source.read()
    return { dtype: source.dtype, shape: source.shape, dispose: () => {} }
  }
}

interface Rank {
  readonly rank: number
  readonly tpDegree: number
}

async function load(directory: string, backend: ReferenceBackend, { rank, tpDegree }: Rank): Promise<LoadReport> {
  const model = Flux2Transformer2DModel.fromConfig(await readConfig(directory))
  const placements = resolvePlan(model, Flux2Transformer2DModel.tensorParallelPlan)
  await using checkpoint = await Checkpoint.open(directory)
  const dtype = 'float32'
  const silent = { component: 'transformer', ignored: [], signal: undefined, onProgress: undefined }
  const { report } = await loadWeights(checkpoint, model, { placements, rank, tpDegree, backend, dtype, ...silent })
  return report
}

/** Bytes of one rank's shards and of what every rank holds whole. */
async function bytesOfRank(directory: string, tpDegree: number, dtype: DType): Promise<number> {
  const model = Flux2Transformer2DModel.fromConfig(await readConfig(directory))
  const placements = resolvePlan(model, Flux2Transformer2DModel.tensorParallelPlan)
  return [...model.namedParameters()]
    .map(([name, { shape }]) => localShape(shape, placements.get(name)?.placement ?? REPLICATED, tpDegree))
    .reduce((sum, shape) => sum + byteSizeOf(shape, dtype), 0)
}

describe.each([
  ['flux2-tiny', referencePath('flux2-tiny', 'transformer'), 'float32'],
  ['flux2-klein-tiny', referencePath('flux2-klein-tiny', 'transformer'), 'float32'],
  ['flux2-tiny-bf16', referencePath('flux2-tiny-bf16', 'transformer'), 'bfloat16'],
  ['the demo', join(demo, 'transformer'), 'bfloat16'],
] as const)('of %s, a rank reads', (_, directory, dtype) => {
  it.each([1, 2, 4])('its own bytes and no others, at degree %i', async (tpDegree) => {
    const localBytes = await bytesOfRank(directory, tpDegree, dtype)
    for (let rank = 0; rank < tpDegree; rank++) {
      const report = await load(directory, new ReadingBackend(), { rank, tpDegree })
      expect(report).toMatchObject({ localBytes, mappedBytes: 0 })
      expect(report.readBytes).toBeGreaterThanOrEqual(localBytes)
      expect(report.readBytes).toBeLessThanOrEqual(1.02 * localBytes)
    }
  })

  it('nothing of what is mapped', async () => {
    const report = await load(directory, new MappingBackend(), { rank: 1, tpDegree: 2 })
    expect(report.mappedBytes).toBeGreaterThan(report.localBytes / 2)
    expect(report.mappedBytes + report.readBytes).toBeLessThanOrEqual(1.02 * report.localBytes)
    expect(await load(directory, new MappingBackend(), { rank: 0, tpDegree: 1 })).toMatchObject({ readBytes: 0 })
  })
})

/** One double and one single block of FLUX.2-klein-4B, in a file without data. */
async function kleinCheckpoint(): Promise<string> {
  const directory = await mkdtemp(join(tmpdir(), 'rankwise-'))
  onTestFinished(() => rm(directory, { recursive: true, force: true }))
  const config = {
    ...((await readConfig(referencePath('flux2-klein-tiny', 'transformer'))) as object),
    ...{
      num_attention_heads: 24,
      attention_head_dim: 128,
      joint_attention_dim: 7680,
      axes_dims_rope: [32, 32, 32, 32],
    },
    ...{ num_layers: 1, num_single_layers: 1 },
  }
  let end = 0
  const header = Object.fromEntries(
    [...Flux2Transformer2DModel.fromConfig(config).namedParameters()].map(([name, { shape }]) => {
      const begin = end
      end += byteSizeOf(shape, 'bfloat16')
      return [name, { dtype: 'BF16', shape, data_offsets: [begin, end] }]
    }),
  )
  const text = Buffer.from(JSON.stringify(header))
  const length = Buffer.alloc(8)
  length.writeBigUInt64LE(BigInt(text.length))
  await using weights = await open(join(directory, 'diffusion_pytorch_model.safetensors'), 'w')
  await weights.write(Buffer.concat([length, text]))
  await weights.truncate(length.length + text.length + end)
  await writeFile(join(directory, 'config.json'), JSON.stringify(config))
  return directory
}

describe('of FLUX.2-klein-4B, a rank reads', () => {
  it.each([2, 4])('its own bytes and no others, at degree %i', async (tpDegree) => {
    const directory = await kleinCheckpoint()
    const localBytes = await bytesOfRank(directory, tpDegree, 'bfloat16')
    const report = await load(directory, new MappingBackend(), { rank: 1, tpDegree })
    const strided = 2 * 3072 * (2 * 3072 + 2 * 9216 + 12288)
    expect(report).toMatchObject({ localBytes, mappedBytes: localBytes - strided / tpDegree })
    expect(report.readBytes).toBeGreaterThanOrEqual(strided / tpDegree)
    expect(report.readBytes).toBeLessThanOrEqual((1.02 * strided) / tpDegree)
    expect(Math.max(...report.largestBuffers.values())).toBe((2 * 3072 * 12288) / tpDegree)
  })
})

describe('of every checkpoint in the fixtures', () => {
  it('the whole is read once', async () => {
    const files = (await readdir(referencePath(), { recursive: true })).filter((file) => file.endsWith('.safetensors'))
    const folders = [...new Set(files.map(dirname))].filter((folder) => !folder.startsWith('goldens'))
    expect(folders.length).toBeGreaterThan(5)
    for (const folder of folders) {
      const weightsName = files.some((file) => file.startsWith(`${folder}/model`)) ? 'model' : 'diffusion_pytorch_model'
      await using checkpoint = await Checkpoint.open(referencePath(folder), { weightsName })
      for (const name of checkpoint.tensors.keys()) await checkpoint.read(name)
      const bytes = [...checkpoint.tensors.values()].reduce((sum, { byteLength }) => sum + byteLength, 0)
      expect(checkpoint.stats.bytesRead).toBe(bytes)
    }
  })
})

import { cp, mkdir, mkdtemp, readdir, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { ort } from '@rankwise/backend-ort'
import { type Backend, type LoadProgress, Tensor } from '@rankwise/core'
import { Generator } from '@rankwise/diffusion'
import { onRanks, referencePath } from '@rankwise/fixtures'
import { afterAll, beforeAll, describe, expect, it, onTestFinished } from 'vitest'
import { DiffusionPipeline, type Flux2FromPretrainedOptions } from '../src/index.ts'
import type { TextEncoderPlacement } from '../src/text-encoder.ts'
import type { LowMemoryResult } from './workers/low-memory.ts'

const PIPELINE = referencePath('flux2-klein-tiny')
const PLACEMENTS: readonly TextEncoderPlacement[] = ['replicated', 'sharded', 'rank0']

it('draws the same on two ranks wherever the text encoder is, and has no weights of it while it denoises', async () => {
  const worker = new URL('workers/low-memory.ts', import.meta.url)
  const ranks = await onRanks<readonly LowMemoryResult[]>(2, worker, PLACEMENTS)
  for (const [rank, results] of ranks.entries()) {
    expect(results).toHaveLength(PLACEMENTS.length)
    for (const [i, { usual, low, others, left }] of results.entries()) {
      const name = `${PLACEMENTS[i]}, rank ${rank}`
      const withoutEncoder = PLACEMENTS[i] === 'rank0' && rank > 0
      expect(usual.duringSteps[0], name).toBeGreaterThan(withoutEncoder ? others - 1 : others)
      for (const { image, duringSteps } of low) {
        expect(image, name).toEqual(usual.image)
        expect(duringSteps, name).toEqual([others, others])
      }
      expect(left, name).toBe(0)
    }
  }
})

describe('lowMemory', () => {
  let backend: Backend
  beforeAll(async () => {
    backend = await ort({ device: 'cpu', threads: 1 })
  })
  afterAll(() => backend.dispose())

  const call = { numInferenceSteps: 1, height: 64, width: 64, maxSequenceLength: 16, outputType: 'latent' } as const

  /** A pipeline, and a list of every load of its text encoder. */
  async function load(directory = PIPELINE, options: Partial<Flux2FromPretrainedOptions> = {}) {
    const loads: string[] = []
    const onProgress = ({ component, loadedBytes, totalBytes }: LoadProgress) => {
      if (component === 'text_encoder' && loadedBytes === totalBytes) loads.push(component)
    }
    const pipeline = await DiffusionPipeline.fromPretrained(directory, {
      backend,
      lowMemory: true,
      onProgress,
      ...options,
    })
    onTestFinished(() => pipeline.dispose())
    return { pipeline, loads }
  }

  it('loads the text encoder once for both prompts of a guided call, and not for embeddings', async () => {
    const { pipeline, loads } = await load(PIPELINE, { isDistilled: false } as object)
    expect(loads).toHaveLength(0)
    await pipeline({ ...call, prompt: 'a cat', guidanceScale: 4 })
    expect(loads).toHaveLength(1)
    const { jointAttentionDim } = pipeline.transformer.config
    const embeds = Tensor.zeros('float32', [1, 16, jointAttentionDim])
    await pipeline({ ...call, promptEmbeds: embeds, negativePromptEmbeds: embeds, guidanceScale: 4 })
    expect(loads).toHaveLength(1)
  })

  it('draws the same for calls that overlap, when one of them is aborted as it loads', async () => {
    const { pipeline } = await load()
    const before = backend.memory()
    const draw = async (prompt: string, signal?: AbortSignal) => {
      const generator = new Generator().manualSeed(1)
      const options = { ...call, prompt, generator, ...(signal === undefined ? {} : { signal }) }
      return (await pipeline(options)).images.data
    }
    const alone = [await draw('a cat'), await draw('a dog')]
    const stop = new AbortController()
    const aborted = expect(draw('a fish', stop.signal)).rejects.toMatchObject({ code: 'ABORTED' })
    const drawing = Promise.all([draw('a cat'), draw('a dog')])
    setImmediate(() => stop.abort())
    await aborted
    expect(await drawing).toEqual(alone)
    expect(backend.memory()).toMatchObject({ weightBytes: before.weightBytes, mappedBytes: before.mappedBytes })
  })

  it('encodes by itself as well, until it is disposed of', async () => {
    const { pipeline, loads } = await load()
    const tokens = () => Tensor.int32([1, 2], Int32Array.of(1, 1))
    const encode = () => pipeline.textEncoder.encode({ inputIds: tokens(), attentionMask: tokens() })
    await encode()
    await encode()
    expect(loads).toHaveLength(2)
    await pipeline.dispose()
    expect(backend.memory()).toEqual({ weightBytes: 0, mappedBytes: 0, executables: 0 })
    await expect(encode()).rejects.toMatchObject({ code: 'MODEL_NOT_LOADED' })
  })

  it.each([
    ['without config', /^config\.json$/, 'CONFIG_NOT_FOUND'],
    ['without weights', /safetensors/, 'CHECKPOINT_NOT_FOUND'],
  ])('refuses a text encoder %s when the pipeline is loaded', async (_name, missing, code) => {
    const directory = await mkdtemp(join(tmpdir(), 'rankwise-'))
    onTestFinished(() => rm(directory, { recursive: true, force: true }))
    await cp(PIPELINE, directory, { recursive: true })
    const folder = join(directory, 'text_encoder')
    for (const name of await readdir(folder)) if (missing.test(name)) await rm(join(folder, name))
    await expect(load(directory)).rejects.toMatchObject({ code })
    expect(backend.memory()).toMatchObject({ weightBytes: 0, mappedBytes: 0 })
  })

  it('loads a pipeline of a hub from the cache, the text encoder with the call', async () => {
    const cacheDir = await mkdtemp(join(tmpdir(), 'rankwise-'))
    onTestFinished(() => rm(cacheDir, { recursive: true, force: true }))
    const repository = join(cacheDir, 'models--org--klein')
    const commit = 'c'.repeat(40)
    await mkdir(join(repository, 'refs'), { recursive: true })
    await writeFile(join(repository, 'refs', 'main'), commit)
    await cp(PIPELINE, join(repository, 'snapshots', commit), { recursive: true })
    const { pipeline, loads } = await load('org/klein', { cacheDir, localFilesOnly: true })
    expect(loads).toHaveLength(0)
    await pipeline({ ...call, prompt: 'a cat' })
    expect(loads).toHaveLength(1)
  })

  it('refuses a text encoder of the caller, and what is no boolean', async () => {
    const { pipeline } = await load()
    const conflict = { code: 'OPTION_CONFLICT', where: 'lowMemory' }
    await expect(load(PIPELINE, { textEncoder: pipeline.textEncoder })).rejects.toMatchObject(conflict)
    const text: object = { lowMemory: 'yes' }
    await expect(load(PIPELINE, text)).rejects.toMatchObject({ code: 'OPTION_INVALID', where: 'lowMemory' })
  })
})

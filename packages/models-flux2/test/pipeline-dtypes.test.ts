import { ort } from '@rankwise/backend-ort'
import { type Backend, Tensor } from '@rankwise/core'
import { ReferenceBackend } from '@rankwise/core/reference'
import { AutoencoderKLFlux2, Generator, postprocess, roundingOf } from '@rankwise/diffusion'
import { expectClose, loadGolden, referencePath } from '@rankwise/fixtures'
import { afterAll, beforeAll, describe, expect, it, vi } from 'vitest'
import { guide } from '../src/guidance.ts'
import {
  type AnyFlux2Pipeline,
  type ComponentDTypes,
  DiffusionPipeline,
  type Flux2FromPretrainedOptions,
  Flux2KleinPipeline,
  Flux2Pipeline,
  type LatentTensor,
} from '../src/index.ts'
import { fingerprintOf, requestOf } from '../src/request.ts'

const DEV = referencePath('flux2-tiny')
const KLEIN = referencePath('flux2-klein-tiny')
const small = { height: 32, width: 48, numInferenceSteps: 2, maxSequenceLength: 16 }
const seeded = () => new Generator().manualSeed(42)

let backend: Backend
let bfloat16: AnyFlux2Pipeline
beforeAll(async () => {
  backend = await ort({ device: 'cpu', threads: 1 })
  bfloat16 = await DiffusionPipeline.fromPretrained(KLEIN, { backend, dtype: 'bfloat16' })
})
afterAll(async () => {
  await bfloat16.dispose()
  expect(backend.memory()).toEqual({ weightBytes: 0, mappedBytes: 0, executables: 0 })
  await backend.dispose()
})

describe('dtype of a pipeline', () => {
  /** Nothing may be read: there is no such folder. */
  const refused = (options: object) =>
    expect(
      Flux2KleinPipeline.fromPretrained(referencePath('nowhere'), {
        backend,
        ...options,
      } as Flux2FromPretrainedOptions),
    ).rejects

  it('is refused with the nearest name of a model that there is not', async () => {
    await refused({ dtype: { textencoder: 'bfloat16' } }).toMatchObject({
      code: 'OPTION_UNKNOWN',
      remedy: "the nearest is 'textEncoder'",
    })
  })

  it.each([
    ['bf16', 'OPTION_INVALID', 'dtype'],
    [null, 'OPTION_INVALID', 'dtype'],
    [[], 'OPTION_INVALID', 'dtype'],
    [['bfloat16'], 'OPTION_INVALID', 'dtype'],
    [{ vae: 16 }, 'OPTION_INVALID', 'dtype.vae'],
    ['float16', 'DTYPE_UNSUPPORTED', 'dtype'],
    [{ transformer: 'float64' }, 'DTYPE_UNSUPPORTED', 'dtype.transformer'],
  ])('is not %o', async (dtype, code, where) => {
    await refused({ dtype }).toMatchObject({ code, where })
  })

  const failing = new Proxy({}, { get: () => expect.unreachable() })

  it.each([
    ['an object without prototype', Object.create(null), '[object]'],
    ['a symbol', Symbol('bfloat16'), 'Symbol(bfloat16)'],
    ['a bigint', 16n, '16'],
    ['a proxy that throws', failing, '[object]'],
    ['a list of such', [Object.create(null)], '[[object]]'],
  ])('nor other options are %s', async (_name, value, text) => {
    for (const name of ['dtype.transformer', 'dtype.textEncoder', 'dtype.vae', 'dtype.default']) {
      const message = expect.stringContaining(`${name} cannot be ${text}`)
      await refused({ dtype: { [name.slice(6)]: value } }).toMatchObject({
        code: 'OPTION_INVALID',
        where: name,
        message,
      })
    }
    for (const where of ['lowMemory', 'textEncoderPlacement']) {
      const message = expect.stringContaining(text)
      await refused({ [where]: value }).toMatchObject({ code: 'OPTION_INVALID', where, message })
    }
    const loading = AutoencoderKLFlux2.fromPretrained(KLEIN, { subfolder: 'vae', backend, dtype: value as never })
    await expect(loading).rejects.toMatchObject({ code: 'DTYPE_UNSUPPORTED', where: 'AutoencoderKLFlux2' })
  })

  it('is one that the backend computes in, for every model that is loaded', async () => {
    await using single = new ReferenceBackend()
    Object.assign(single, { supports: { dtypes: ['float32'] } })
    const where = 'dtype of the vae'
    await refused({ backend: single, dtype: { vae: 'bfloat16' } }).toMatchObject({ code: 'DTYPE_UNSUPPORTED', where })
    const { vae } = bfloat16
    // Of a model that is given, nothing is asked.
    await refused({ backend: single, vae, dtype: { default: 'float32' } }).toMatchObject({ code: 'CONFIG_NOT_FOUND' })
  })

  it('is not said of a model that is given', async () => {
    const { vae } = bfloat16
    await refused({ vae, dtype: { vae: 'bfloat16' } }).toMatchObject({ code: 'OPTION_CONFLICT', where: 'dtype.vae' })
  })

  it.each(['bfloat16', { default: 'bfloat16' }])('is not said where all models are given: %o', async (dtype) => {
    const { transformer, textEncoder, vae } = bfloat16
    const given = { transformer, textEncoder, vae, dtype }
    await refused(given).toMatchObject({ code: 'OPTION_CONFLICT', where: 'dtype' })
  })

  it.each<[ComponentDTypes | undefined, readonly string[]]>([
    [undefined, ['float32', 'float32', 'float32']],
    [{ transformer: 'bfloat16' }, ['bfloat16', 'float32', 'float32']],
    [{ default: 'bfloat16', vae: 'float32' }, ['bfloat16', 'bfloat16', 'float32']],
  ])('%o is that of transformer, text encoder and VAE', async (dtype, expected) => {
    await using pipeline = await DiffusionPipeline.fromPretrained(KLEIN, {
      backend,
      ...(dtype === undefined ? {} : { dtype }),
    })
    const { transformer, textEncoder, vae } = pipeline
    expect([transformer, textEncoder, vae].map((model) => (model as typeof vae).dtype)).toEqual(expected)
  })
})

describe('models of different dtypes', () => {
  it.each<ComponentDTypes>([
    { transformer: 'bfloat16', vae: 'float32' },
    { transformer: 'float32', default: 'bfloat16' },
  ])('draw together: %o', async (dtype) => {
    await using pipeline = await Flux2Pipeline.fromPretrained(DEV, { backend, dtype })
    const draw = <T extends 'latent' | 'array'>(outputType: T) =>
      pipeline({ ...small, prompt: 'a cat', generator: seeded(), outputType })
    const latents = (await draw('latent')).images as LatentTensor
    expect(latents.dtype).toBe(pipeline.transformer.dtype)
    // The picture is that of a VAE of its own, of the latents in its dtype.
    await using vae = await AutoencoderKLFlux2.fromPretrained(DEV, {
      subfolder: 'vae',
      backend,
      dtype: pipeline.vae.dtype,
    })
    const decode = vi.spyOn(pipeline.vae, 'decode')
    const { images } = await draw('array')
    const [given] = decode.mock.calls[0] as [LatentTensor]
    expect(given.dtype).toBe(latents.dtype)
    const decoded = (await vae.decode(given.cast(vae.dtype))) as LatentTensor
    expect(decoded.dtype).toBe(vae.dtype)
    expect(images).toEqual(postprocess(decoded, 'array'))
  })
})

describe('a call in bfloat16', () => {
  const embeds = () => new Generator().manualSeed(1).randn([1, 16, bfloat16.transformer.config.jointAttentionDim])
  const noise = () => seeded().randn([1, 128, 2, 3])
  const draw = async (options: object) => {
    const { images } = await bfloat16({ ...small, ...options, outputType: 'latent' })
    expect(images.dtype).toBe('bfloat16')
    return images.data
  }

  it('casts embeddings and latents of the caller', async () => {
    const drawn = await draw({ promptEmbeds: embeds(), generator: seeded() })
    const given = { promptEmbeds: embeds().cast('bfloat16'), latents: noise() }
    expect(await draw(given)).toEqual(drawn)
    expect(await draw({ ...given, latents: noise().cast('bfloat16') })).toEqual(drawn)
    expect(await draw({ ...given, latents: noise().cast('float16') })).not.toEqual(drawn)
  })

  it.each(['promptEmbeds', 'latents'])('refuses %s of integers', async (name) => {
    const integers = Tensor.zeros('int32', name === 'latents' ? [1, 128, 2, 3] : [1, 16, 96])
    const given = name === 'latents' ? { prompt: 'a cat' } : {}
    await expect(draw({ ...given, [name]: integers })).rejects.toMatchObject({ code: 'DTYPE_UNSUPPORTED', where: name })
  })

  it('starts the next step from latents of the callback as they are, as diffusers does', async () => {
    const replaced = new Generator().manualSeed(3).randn([1, 6, 128])
    const finish = (latents: LatentTensor) =>
      draw({
        promptEmbeds: embeds(),
        generator: seeded(),
        callbackOnStepEnd: ({ step }: { readonly step: number }) => (step === 0 ? latents : undefined),
      })
    const [wide, narrow] = [await finish(replaced), await finish(replaced.cast('bfloat16'))]
    expect(wide).not.toEqual(narrow)
    const values = (data: typeof wide) => new Tensor('bfloat16', [data.length], data as Uint16Array)
    expectClose(values(wide), values(narrow), { relativeRms: 2e-2 })
    await expect(finish(Tensor.zeros('int32', [1, 6, 128]) as never)).rejects.toMatchObject({
      code: 'DTYPE_UNSUPPORTED',
      where: 'callbackOnStepEnd',
    })
  })
})

describe('ranks', () => {
  it('have to agree on the dtypes of the models whose results they exchange', () => {
    const request = requestOf(
      { prompt: 'a cat', generator: seeded() },
      { name: 'test', options: [], numInferenceSteps: 4, guidanceScale: 1, textEncoderOutLayers: [9] },
      { pixelsPerToken: 16, height: 64, width: 64 },
    )
    const hashes = (['float32', 'bfloat16'] as const).flatMap((transformer) =>
      (['float32', 'bfloat16'] as const).map((vae) => fingerprintOf(request, [], { transformer, vae })),
    )
    expect(new Set(hashes).size).toBe(4)
    expect(fingerprintOf(request, [], { transformer: 'float32', vae: 'float32' })).toBe(hashes[0])
  })
})

describe('guidance', () => {
  it('is rounded after every operation', () => {
    const round = roundingOf('bfloat16')
    const [positive, negative] = [5, 6].map((seed) => new Generator().manualSeed(seed).randn([100]).cast('bfloat16'))
    const [p, n] = [positive, negative].map((tensor) => (tensor as LatentTensor).cast('float32').data)
    const guided = guide(positive as LatentTensor, negative as LatentTensor, 4.1)
    expect(guided.dtype).toBe('bfloat16')
    const by = (each: (value: number) => number) =>
      Array.from(p as Float32Array, (value, i) => {
        const base = (n as Float32Array)[i] as number
        return round(base + each(Math.fround(4.1) * each(value - base)))
      })
    expect([...guided.cast('float32').data]).toEqual(by(round))
    expect([...guided.cast('float32').data]).not.toEqual(by(Math.fround))
  })
})

describe('a transformer in bfloat16', () => {
  it('is traced in it, but for the rotary tables', () => {
    const graph = bfloat16.transformer.trace({ imageTokens: 6, textTokens: 3, dtype: 'bfloat16' })
    const types = Object.fromEntries(graph.inputs.map(({ name, dtype }) => [name, dtype]))
    expect(types).toEqual({
      hidden_states: 'bfloat16',
      encoder_hidden_states: 'bfloat16',
      timestep: 'bfloat16',
      rotary_cos: 'float32',
      rotary_sin: 'float32',
    })
    expect(new Set(graph.parameters.map(({ dtype }) => dtype))).toEqual(new Set(['bfloat16']))
    expect(graph.outputs.sample?.dtype).toBe('bfloat16')
  })

  it('takes noise levels that are rounded twice, and the golden has others than rounded once', async () => {
    const golden = await loadGolden('pipeline/dev.t2i.64x96.bf16.safetensors')
    const levels = golden.get('model_timestep').cast('float32').data
    const once = Array.from(golden.get('timesteps').data as Float32Array, (t) => roundingOf('bfloat16')(t / 1000))
    expect([...levels]).not.toEqual(once)
  })
})

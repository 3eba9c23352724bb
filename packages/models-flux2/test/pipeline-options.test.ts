import { ort } from '@rankwise/backend-ort'
import { type Backend, sizeOf, Tensor } from '@rankwise/core'
import { type Callable, Generator, packLatents } from '@rankwise/diffusion'
import { expectClose, type GoldenTensors, loadGolden, referencePath } from '@rankwise/fixtures'
import { afterAll, beforeAll, describe, expect, it, vi } from 'vitest'
import { type DenoisingStep, Flux2KleinPipeline } from '../src/index.ts'

const PROMPT = 'a photo of a cat holding a sign that says hello world'
const small = { height: 32, width: 48, numInferenceSteps: 2, maxSequenceLength: 16 }

let backend: Backend
let pipeline: Callable<Flux2KleinPipeline>

beforeAll(async () => {
  backend = await ort({ device: 'cpu', threads: 1 })
  pipeline = await Flux2KleinPipeline.fromPretrained(referencePath('flux2-klein-tiny'), { backend })
})
afterAll(async () => {
  await pipeline.dispose()
  expect(backend.memory()).toEqual({ weightBytes: 0, mappedBytes: 0, executables: 0 })
  await backend.dispose()
})

const seeded = (seed: number) => new Generator().manualSeed(seed)

/** The pictures of a batch as bytes, one by one. */
async function pictures(options: Parameters<Callable<Flux2KleinPipeline>>[0]): Promise<Uint8Array[]> {
  const { images } = await pipeline.generate<'image'>({ ...small, ...options, outputType: 'image' })
  return images.map(({ data }) => data)
}

describe('output types', () => {
  const golden128 = { height: 128, width: 128, numInferenceSteps: 4, prompt: PROMPT }
  let golden: GoldenTensors
  beforeAll(async () => {
    golden = await loadGolden('pipeline/klein.t2i.128x128.distilled.safetensors')
  })

  it('latent gives what the VAE takes', async () => {
    const { images } = await pipeline({ ...golden128, generator: seeded(42), outputType: 'latent' })
    expect(images.shape).toEqual([1, 32, 16, 16])
    expectClose(images, golden.get('output_type_latent'), { relativeRms: 2e-5 })
  })

  it('array gives colours in [0, 1]', async () => {
    const { images } = await pipeline({ ...golden128, generator: seeded(42), outputType: 'array' })
    expect(images.shape).toEqual([1, 128, 128, 3])
    expectClose(images.data, golden.get('image').data as Float32Array, { absolute: 2e-5 })
  })

  it('embeds the prompt as diffusers does, and takes embeddings instead of it', async () => {
    const promptEmbeds = golden.get('prompt_embeds')
    const { images } = await pipeline({
      height: 128,
      width: 128,
      numInferenceSteps: 4,
      promptEmbeds,
      generator: seeded(42),
      outputType: 'latent',
    })
    expectClose(images, golden.get('output_type_latent'), { relativeRms: 2e-5 })
  })
})

describe('batches', () => {
  it('of prompts with a generator each are the pictures one by one', async () => {
    const [cat] = await pictures({ prompt: 'a cat', generator: seeded(1) })
    const [dog] = await pictures({ prompt: 'a dog', generator: seeded(2) })
    const both = await pictures({ prompt: ['a cat', 'a dog'], generator: [seeded(1), seeded(2)] })
    expect(both).toHaveLength(2)
    for (const [i, alone] of [cat, dog].entries()) {
      const apart = Array.from(both[i] ?? [], (value, j) => Math.abs(value - (alone?.[j] as number)))
      expect(Math.max(...apart)).toBeLessThanOrEqual(1)
    }
    expect(both[0]).not.toEqual(both[1])
  })

  it('of several pictures per prompt differ by their noise', async () => {
    const drawn = await pictures({ prompt: ['a cat', 'a dog'], numImagesPerPrompt: 2, generator: seeded(3) })
    expect(drawn).toHaveLength(4)
    expect(new Set(drawn.map((data) => data.join())).size).toBe(4)
  })

  it('need as many generators as pictures', async () => {
    await expect(pictures({ prompt: ['a', 'b'], generator: [seeded(1)] })).rejects.toMatchObject({
      code: 'GENERATOR_BATCH',
    })
  })
})

describe('the steps', () => {
  it('come one by one, and the callback may replace the latents', async () => {
    const seen: DenoisingStep[] = []
    const zeros = (step: DenoisingStep) => Tensor.zeros('float32', step.latents.shape)
    const steps = pipeline.steps({
      ...small,
      prompt: 'a cat',
      generator: seeded(1),
      outputType: 'latent',
      callbackOnStepEnd: (step) => (step.step === 1 ? zeros(step) : undefined),
    })
    let next = await steps.next()
    while (next.done !== true) {
      seen.push(next.value)
      next = await steps.next()
    }
    expect(seen.map(({ step, totalSteps }) => [step, totalSteps])).toEqual([
      [0, 2],
      [1, 2],
    ])
    expect(seen[0]?.timestep).toBe(1000)
    expect(seen[1]?.latents.data.every((value) => value === 0)).toBe(true)
    // Zeros denormalise to the mean of each channel: every latent of a channel's corner is the same.
    expect(new Set(packLatents(next.value.images).data).size).toBeLessThanOrEqual(sizeOf([32, 4]))
  })

  it.each([
    [
      'of another shape',
      Tensor.zeros('float32', [1, 3, 128]),
      'LATENTS_SHAPE',
      'callbackOnStepEnd: the latents that it returned do not fit the picture\n  actual: step 1, returned [1, 3, 128], expected [1, 6, 128]',
    ],
    [
      'that are not packed',
      Tensor.zeros('float32', [1, 128, 2, 3]),
      'LATENTS_SHAPE',
      'returned [1, 128, 2, 3], expected [1, 6, 128]',
    ],
    [
      'of integers',
      Tensor.zeros('int32', [1, 6, 128]),
      'DTYPE_UNSUPPORTED',
      'callbackOnStepEnd: latents and embeddings are not of int32',
    ],
    ['in an object', { latents: Tensor.zeros('float32', [1, 6, 128]) }, 'OPTION_INVALID', 'step 1, returned object'],
    ['of null', null, 'OPTION_INVALID', 'step 1, returned null'],
  ])('refuse latents %s of the callback', async (_name, returned, code, message) => {
    const callbackOnStepEnd = (({ step }: DenoisingStep) => (step === 1 ? returned : undefined)) as never
    await expect(pipeline({ ...small, prompt: 'a cat', callbackOnStepEnd })).rejects.toMatchObject({
      code,
      where: 'callbackOnStepEnd',
      message: expect.stringContaining(message),
    })
  })

  it('stop when the signal is aborted', async () => {
    const controller = new AbortController()
    const drawing = pipeline({
      ...small,
      prompt: 'a cat',
      numInferenceSteps: 50,
      signal: controller.signal,
      callbackOnStepEnd: ({ step }) => {
        if (step === 1) controller.abort(new Error('enough'))
        return undefined
      },
    })
    await expect(drawing).rejects.toMatchObject({ code: 'ABORTED', cause: new Error('enough') })
    await expect(pipeline({ ...small, prompt: 'a cat', signal: AbortSignal.abort() })).rejects.toMatchObject({
      code: 'ABORTED',
    })
  })

  it('take latents of the caller and leave them as they are', async () => {
    const latents = seeded(9).randn([1, 128, 2, 3])
    const before = latents.data.slice()
    const drawn = await pictures({ prompt: 'a cat', latents })
    expect(drawn).toEqual(await pictures({ prompt: 'a cat', generator: seeded(9) }))
    expect(latents.data).toEqual(before)
  })

  it('draw other noise every time without a generator', async () => {
    const twice = [await pictures({ prompt: 'a cat' }), await pictures({ prompt: 'a cat' })]
    expect(twice[0]).not.toEqual(twice[1])
  })
})

describe('options', () => {
  it.each([
    ['an unknown one', { prompt: 'a cat', numInferenceStep: 3 }, 'OPTION_UNKNOWN'],
    ['neither prompt nor embeddings', {}, 'PROMPT_MISSING'],
    ['both', { prompt: 'a cat', promptEmbeds: Tensor.zeros('float32', [1, 2, 96]) }, 'PROMPT_MISSING'],
    ['half a step', { prompt: 'a cat', numInferenceSteps: 0.5 }, 'OPTION_INVALID'],
    ['no size', { prompt: 'a cat', height: 0 }, 'OPTION_INVALID'],
    ['less than a token', { prompt: 'a cat', width: 15 }, 'OPTION_INVALID'],
    ['no guidance', { prompt: 'a cat', guidanceScale: Number.NaN }, 'OPTION_INVALID'],
    ['another output', { prompt: 'a cat', outputType: 'jpeg' as 'image' }, 'OPTION_INVALID'],
    ['latents of another size', { prompt: 'a cat', latents: Tensor.zeros('float32', [1, 128, 3, 3]) }, 'LATENTS_SHAPE'],
    ['embeddings of another width', { promptEmbeds: Tensor.zeros('float32', [1, 2, 95]) }, 'PROMPT_EMBEDS_SHAPE'],
    ['sigmas that ascend', { prompt: 'a cat', sigmas: [0.1, 0.5] }, 'OPTION_INVALID'],
    ['a sigma of 0', { prompt: 'a cat', sigmas: [1, 0] }, 'OPTION_INVALID'],
    ['steps without end', { prompt: 'a cat', numInferenceSteps: 5e9 }, 'OPTION_INVALID'],
    ['a layer that is not loaded', { prompt: 'a cat', textEncoderOutLayers: [28] }, 'OUT_LAYERS'],
    ['other numbers of sigmas and steps', { prompt: 'a cat', sigmas: [1, 0.5, 0.2] }, 'SCHEDULER_SIGMAS'],
  ])('refuse %s', async (_name, options, code) => {
    await expect(pipeline({ ...small, ...options })).rejects.toMatchObject({ code })
  })

  it.each([
    ['an object without prototype', Object.create(null)],
    ['a symbol', Symbol('odd')],
    ['a bigint', 3n],
    ['null', null],
    ['a proxy that throws', new Proxy({}, { get: () => expect.unreachable() })],
  ])('refuse %s wherever it is given', async (_name, odd) => {
    const names = ['height', 'width', 'numInferenceSteps', 'numImagesPerPrompt', 'guidanceScale', 'maxSequenceLength']
    for (const name of [...names, 'sigmas', 'outputType', 'latents', 'prompt']) {
      const given = { ...small, prompt: 'a cat', [name]: odd }
      // Null is no reason not to take the default, for these.
      const isLeftOut = odd === null && (names.includes(name) || name === 'outputType')
      if (!isLeftOut) await expect(pipeline(given)).rejects.toMatchObject({ code: 'OPTION_INVALID', where: name })
    }
    const embeds = { ...small, promptEmbeds: odd as never }
    await expect(pipeline(embeds)).rejects.toMatchObject({ code: 'OPTION_INVALID', where: 'promptEmbeds' })
  })

  it('say that a distilled model takes no guidance, when it was asked for', async () => {
    const warn = vi.spyOn(process, 'emitWarning').mockImplementation(() => {})
    await pipeline({ ...small, prompt: 'a cat' })
    expect(warn).not.toHaveBeenCalled()
    await pipeline({ ...small, prompt: 'a cat', guidanceScale: 3 })
    expect(warn).toHaveBeenCalledWith(expect.any(String), expect.objectContaining({ code: 'GUIDANCE_IGNORED' }))
    warn.mockRestore()
  })

  it('round a size down to whole tokens, with a warning', async () => {
    const warn = vi.spyOn(process, 'emitWarning').mockImplementation(() => {})
    const { images } = await pipeline({ ...small, prompt: 'a cat', height: 47 })
    expect([images[0].height, images[0].width]).toEqual([32, 48])
    expect(warn).toHaveBeenCalledWith(
      expect.stringContaining('height 47'),
      expect.objectContaining({ code: 'SIZE_ROUNDED' }),
    )
    warn.mockRestore()
  })
})

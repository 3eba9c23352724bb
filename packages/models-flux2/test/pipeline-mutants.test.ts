import { ort } from '@rankwise/backend-ort'
import { type Backend, Tensor } from '@rankwise/core'
import { Generator, type Image } from '@rankwise/diffusion'
import { loadGolden, referencePath } from '@rankwise/fixtures'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import {
  type AnyFlux2Pipeline,
  DiffusionPipeline,
  type Flux2FromPretrainedOptions,
  Flux2KleinKVPipeline,
  type Flux2KleinOptions,
  Flux2KleinPipeline,
} from '../src/index.ts'
import { expectRoundedSteps, expectWithinSpread, type Run, tensorOf } from './golden-bfloat16.ts'
import { goldenImages } from './golden-images.ts'
import { expectSameLatents } from './golden-latents.ts'

const PROMPT = 'a photo of a cat holding a sign that says hello world'
const SMALL = { prompt: PROMPT, numInferenceSteps: 4, height: 64, width: 96, maxSequenceLength: 128 }

let backend: Backend
let dev: AnyFlux2Pipeline
let klein: Flux2FromPretrainedOptions & Awaited<ReturnType<typeof Flux2KleinPipeline.fromPretrained>>

beforeAll(async () => {
  backend = await ort({ device: 'cpu', threads: 1 })
  dev = await DiffusionPipeline.fromPretrained(referencePath('flux2-tiny'), { backend })
  klein = Object.assign(await Flux2KleinPipeline.fromPretrained(referencePath('flux2-klein-tiny'), { backend }), {
    backend,
  })
})
afterAll(async () => {
  await dev.dispose()
  await klein.dispose()
  await backend.dispose()
})

/** Whether a call has the latents of a golden after every step. */
async function check(
  pipeline: AnyFlux2Pipeline,
  golden: string,
  options: Flux2KleinOptions,
  { seed = 42 } = {},
): Promise<void> {
  const latents: Tensor[] = []
  const generator = new Generator().manualSeed(seed)
  const callbackOnStepEnd: Flux2KleinOptions['callbackOnStepEnd'] = (step) => {
    latents.push(step.latents)
    return undefined
  }
  await pipeline({ ...SMALL, ...options, generator, callbackOnStepEnd, outputType: 'latent' })
  expectSameLatents(latents, await loadGolden(`pipeline/${golden}.safetensors`))
}

describe('the checks of bfloat16 notice', () => {
  /** What diffusers computed, as if it were a run of ours. */
  async function goldenRun() {
    const golden = await loadGolden('pipeline/dev.t2i.64x96.bf16.safetensors')
    const steps = [0, 1, 2, 3]
    const levels = golden.get('model_timestep')
    const run: Run = {
      latents: steps.map((step) => golden.get(`latents.${step + 1}`)),
      forwards: steps.map((step) => ({
        timestep: new Tensor(levels.dtype, [1], levels.data.slice(step, step + 1) as never),
        promptEmbeds: golden.get('prompt_embeds'),
        sample: golden.get(`noise_pred.${step}`),
      })),
    }
    return { golden, run }
  }

  it('nothing of diffusers itself', async () => {
    const { golden, run } = await goldenRun()
    await expectWithinSpread(run, golden)
    expectRoundedSteps(run, golden, golden.get('latents.0'))
  })

  it('timesteps that are not rounded before they are divided', async () => {
    const { golden, run } = await goldenRun()
    const timesteps = golden.get('timesteps').data as Float32Array
    const forwards = run.forwards.map((forward, step) => ({
      ...forward,
      timestep: Tensor.float32([1], [(timesteps[step] as number) / 1000]).cast('bfloat16'),
    }))
    await expect(expectWithinSpread({ ...run, forwards }, golden)).rejects.toThrow()
  })

  it('latents in float32', async () => {
    const { golden, run } = await goldenRun()
    const latents = run.latents.map((tensor) => tensorOf(tensor).cast('float32'))
    await expect(expectWithinSpread({ ...run, latents }, golden)).rejects.toThrow('float32')
  })

  it('steps that are rounded at their end only', async () => {
    const { golden, run } = await goldenRun()
    const sigmas = golden.get('sigmas').data as Float32Array
    const [noise, sample] = [golden.get('latents.0'), golden.get('noise_pred.0')].map((x) => x.cast('float32'))
    const dt = (sigmas[1] as number) - (sigmas[0] as number)
    const stepped = Array.from(noise?.data ?? [], (x, i) => x + dt * (sample?.data[i] as number))
    const first = Tensor.float32(golden.get('latents.1').shape, stepped).cast('bfloat16')
    const latents = [first, ...run.latents.slice(1)]
    expect(() => expectRoundedSteps({ ...run, latents }, golden, golden.get('latents.0'))).toThrow('step 0')
  })
})

describe('the goldens of the pipelines notice', () => {
  it('another seed and another guidance scale', async () => {
    await check(dev, 'dev.t2i.64x96.g2.5', { guidanceScale: 2.5 })
    await expect(check(dev, 'dev.t2i.64x96.g2.5', { guidanceScale: 2.5 }, { seed: 43 })).rejects.toThrow('relative RMS')
    await expect(check(dev, 'dev.t2i.64x96.g2.5', { guidanceScale: 2.51 })).rejects.toThrow('relative RMS')
  })

  it('references in another order, and one that is missing', async () => {
    const golden = 'dev.i2i.64x96.two_refs'
    const [first, second] = (await goldenImages(`pipeline/${golden}.safetensors`, 2)) as [Image, Image]
    await expect(check(dev, golden, { image: [second, first] })).rejects.toThrow('relative RMS')
    await expect(check(dev, golden, { image: first })).rejects.toThrow('relative RMS')
  })

  it('a pipeline that attends to references in another way', async () => {
    const { transformer, textEncoder, vae, tokenizer, scheduler } = klein
    const components = { transformer, textEncoder, vae, tokenizer, scheduler }
    const cached = await Flux2KleinKVPipeline.fromPretrained(referencePath('flux2-klein-tiny'), {
      backend,
      ...components,
    })
    const image = await goldenImages('pipeline/klein-kv.i2i.64x96.safetensors', 1)
    await check(cached, 'klein-kv.i2i.64x96', { image })
    await expect(check(klein, 'klein-kv.i2i.64x96', { image })).rejects.toThrow('relative RMS')
    await expect(check(cached, 'klein.i2i.64x96.distilled', { image })).rejects.toThrow('relative RMS')
  })
})

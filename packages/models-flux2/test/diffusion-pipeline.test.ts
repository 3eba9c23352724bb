import { cp, mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { ort } from '@rankwise/backend-ort'
import type { Backend } from '@rankwise/core'
import { Generator, Image } from '@rankwise/diffusion'
import { expectClose, loadGolden, referencePath } from '@rankwise/fixtures'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import {
  type AnyFlux2Pipeline,
  DiffusionPipeline,
  Flux2KleinKVPipeline,
  Flux2KleinPipeline,
  Flux2Pipeline,
} from '../src/index.ts'

let backend: Backend
let dev: AnyFlux2Pipeline
let klein: AnyFlux2Pipeline
let folder: string

beforeAll(async () => {
  backend = await ort({ device: 'cpu', threads: 1 })
  dev = await DiffusionPipeline.fromPretrained(referencePath('flux2-tiny'), { backend })
  klein = await DiffusionPipeline.fromPretrained(referencePath('flux2-klein-tiny'), { backend })
  folder = await mkdtemp(join(tmpdir(), 'rankwise-'))
})
afterAll(async () => {
  await dev.dispose()
  await klein.dispose()
  expect(backend.memory()).toEqual({ weightBytes: 0, mappedBytes: 0, executables: 0 })
  await backend.dispose()
  await rm(folder, { recursive: true })
})

/** The small parts of the klein pipeline, as one of another class. */
async function pipelineOf(className: string): Promise<string> {
  const directory = join(folder, className)
  for (const part of ['scheduler', 'tokenizer']) {
    await cp(referencePath('flux2-klein-tiny', part), join(directory, part), { recursive: true })
  }
  await writeFile(join(directory, 'model_index.json'), JSON.stringify({ _class_name: className }))
  return directory
}

describe('DiffusionPipeline', () => {
  it('picks the class of the folder and takes components of the caller', async () => {
    expect(dev).toBeInstanceOf(Flux2Pipeline)
    expect(klein).toBeInstanceOf(Flux2KleinPipeline)
    const { transformer, textEncoder, vae } = klein
    const given = { transformer, textEncoder, vae }
    const cached = await DiffusionPipeline.fromPretrained(await pipelineOf('Flux2KleinKVPipeline'), {
      backend,
      ...given,
    })
    expect(cached).toBeInstanceOf(Flux2KleinKVPipeline)
    expect(cached.transformer).toBe(transformer)
    expect(cached.textEncoder).toBe(textEncoder)
    expect(cached.vae).toBe(vae)
  })

  it.each([
    ['a class that there is not', () => pipelineOf('FluxPipeline'), 'PIPELINE_CLASS'],
    ['a folder without a pipeline', async () => join(folder, 'nothing'), 'CONFIG_NOT_FOUND'],
  ])('refuses %s', async (_name, place, code) => {
    await expect(DiffusionPipeline.fromPretrained(await place(), { backend })).rejects.toMatchObject({ code })
  })
})

describe('fromPretrained of a class', () => {
  it('refuses the folder of another, and options that there are not', async () => {
    const place = referencePath('flux2-klein-tiny')
    await expect(Flux2Pipeline.fromPretrained(place, { backend })).rejects.toMatchObject({ code: 'PIPELINE_CLASS' })
    const without = {} as { readonly backend: Backend }
    await expect(Flux2KleinPipeline.fromPretrained(place, without)).rejects.toMatchObject({ code: 'OPTION_INVALID' })
    const misspelt = { backend, tokeniser: klein.tokenizer }
    await expect(Flux2KleinPipeline.fromPretrained(place, misspelt)).rejects.toMatchObject({
      code: 'OPTION_UNKNOWN',
      remedy: "the nearest is 'tokenizer'",
    })
  })
})

describe('calls', () => {
  const small = { prompt: 'a cat', numInferenceSteps: 1, maxSequenceLength: 64, outputType: 'latent' as const }
  const grey = (width: number, height: number) => new Image(width, height, new Uint8Array(width * height * 3).fill(127))

  it('of FLUX.2-dev give latents packed, as diffusers does', async () => {
    const golden = await loadGolden('pipeline/dev.t2i.64x96.g2.5.safetensors')
    const { images } = await dev({
      prompt: 'a photo of a cat holding a sign that says hello world',
      height: 64,
      width: 96,
      numInferenceSteps: 4,
      guidanceScale: 2.5,
      maxSequenceLength: 128,
      generator: new Generator().manualSeed(42),
      outputType: 'latent',
    })
    expect(images.shape).toEqual([1, 24, 128])
    expectClose(images, golden.get('output_type_latent'), { relativeRms: 2e-5 })
  })

  it('have the size of the first reference unless they say otherwise, for every picture of a batch', async () => {
    const image = [grey(101, 75), grey(64, 64)]
    const { images } = await klein({ ...small, image, prompt: ['a cat', 'a dog'], width: 32 })
    // Latents of 8 x 8 pixels.
    expect(images.shape).toEqual([2, 32, 64 / 8, 32 / 8])
  })

  it.each([
    ['a reference that is too small', { image: grey(63, 200) }, 'REFERENCE_TOO_SMALL'],
    ['no reference in a list', { image: [] }, 'REFERENCE_MISSING'],
    ['a file that is not there', { image: 'nowhere.png' }, 'IMAGE_READ'],
  ])('refuse %s', async (_name, options, code) => {
    await expect(klein({ ...small, ...options })).rejects.toMatchObject({ code })
  })

  it('refuse options of other classes', async () => {
    const negative = (await loadGolden('pipeline/klein-base.t2i.64x96.cfg4.safetensors')).get('negative_prompt_embeds')
    await expect(dev({ ...small, negativePromptEmbeds: negative })).rejects.toMatchObject({
      code: 'OPTION_UNKNOWN',
      where: 'Flux2Pipeline',
      remedy: "the nearest is 'promptEmbeds'",
    })
  })
})

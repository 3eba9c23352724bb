import { mkdtemp, readdir, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { ort } from '@rankwise/backend-ort'
import { type SaveProgress, sizeOf } from '@rankwise/core'
import { directory as demoDirectory } from '@rankwise/demo-flux2'
import { Mistral3ForConditionalGeneration, Qwen3ForCausalLM } from '@rankwise/diffusion'
import { afterEach, beforeEach, describe, expect, test } from 'vitest'
import {
  FLUX2_PRESETS,
  Flux2KleinPipeline,
  type Flux2Preset,
  Flux2Transformer2DModel,
  writeSyntheticPipeline,
} from '../src/index.ts'
import { SyntheticWeights } from '../src/synthetic-weights.ts'

const tokenizer = join(demoDirectory, 'tokenizer')

/** The widths of klein-4B, but for what makes it large. */
const tiny: Flux2Preset = {
  ...FLUX2_PRESETS['flux2-klein-4b'],
  transformer: {
    ...FLUX2_PRESETS['flux2-klein-4b'].transformer,
    num_layers: 1,
    num_single_layers: 1,
    num_attention_heads: 2,
    joint_attention_dim: 96,
  },
  textEncoder: {
    ...FLUX2_PRESETS['flux2-klein-4b'].textEncoder,
    hidden_size: 32,
    intermediate_size: 64,
    num_attention_heads: 4,
    num_key_value_heads: 2,
    head_dim: 16,
    vocab_size: 4000,
  },
}

let folder: string
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), 'rankwise-synthetic-'))
})
afterEach(() => rm(folder, { recursive: true }))

describe('presets', () => {
  // The table in the README of the reference data.
  test.each([
    ['flux2-dev', 32.22e9],
    ['flux2-klein-4b', 3.876e9],
    ['flux2-klein-9b', 9.079e9],
  ] as const)('the transformer of %s has %d weights', (name, expected) => {
    const { transformer } = FLUX2_PRESETS[name]
    const count = countOf(Flux2Transformer2DModel.fromConfig(transformer))
    expect(Math.abs(count / expected - 1)).toBeLessThan(2e-4)
  })

  test.each(Object.entries(FLUX2_PRESETS))('the text encoder of %s fits its transformer', (_, preset) => {
    const TextEncoder = preset.className === 'Flux2Pipeline' ? Mistral3ForConditionalGeneration : Qwen3ForCausalLM
    const { config, outLayers } = TextEncoder.fromConfig(preset.textEncoder)
    expect(config.hiddenSize * outLayers.length).toBe(preset.transformer.joint_attention_dim)
  })
})

test('a pipeline of random weights draws a picture, and says how far it is', async () => {
  const progress: SaveProgress[] = []
  await writeSyntheticPipeline(folder, tiny, { tokenizer, onProgress: (saved) => progress.push(saved) })
  expect(new Set(progress.map(({ component }) => component))).toEqual(new Set(['transformer', 'text_encoder', 'vae']))
  await using backend = await ort({ device: 'cpu', threads: 1 })
  await using pipeline = await Flux2KleinPipeline.fromPretrained(folder, { backend })
  const { images } = await pipeline({
    prompt: 'a cat',
    height: 32,
    width: 32,
    numInferenceSteps: 1,
    maxSequenceLength: 16,
  })
  // Numbers that are not finite are refused before they become a picture.
  expect(new Set(images[0].data).size).toBeGreaterThan(16)
})

test('an abort leaves no pipeline that looks complete', async () => {
  const stop = new AbortController()
  const onProgress = () => stop.abort()
  const written = writeSyntheticPipeline(folder, tiny, { tokenizer, signal: stop.signal, onProgress })
  await expect(written).rejects.toMatchObject({ code: 'ABORTED' })
  expect(await readdir(folder)).not.toContain('model_index.json')
})

test('a disk that is too small is told before anything is written', async () => {
  const huge = { ...tiny, transformer: { ...tiny.transformer, num_attention_heads: 4096 } }
  await expect(writeSyntheticPipeline(folder, huge, { tokenizer })).rejects.toMatchObject({ code: 'DISK_SPACE' })
  expect(await readdir(folder)).toEqual([])
})

test('weights differ, and are the same in every run', () => {
  const draw = () => {
    const weights = new SyntheticWeights()
    return Array.from({ length: 3 }, (_, i) => weights.weight(`layers.${i}.weight`, [2 ** 22]).data).map(({ buffer }) =>
      Buffer.from(buffer),
    )
  }
  const [first, second] = draw()
  // Bytes: millions of numbers would take a minute.
  expect(first?.equals(second as Buffer)).toBe(false)
  expect(draw()[0]?.equals(first as Buffer)).toBe(true)
  const scales = new SyntheticWeights().weight('layers.0.input_layernorm.weight', [4])
  expect([...scales.cast('float32').data]).toEqual([1, 1, 1, 1])
})

function countOf(model: Flux2Transformer2DModel): number {
  return Array.from(model.namedParameters(), ([, { shape }]) => sizeOf(shape)).reduce((sum, size) => sum + size, 0)
}

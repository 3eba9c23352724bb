import { ort } from '@rankwise/backend-ort'
import { type Backend, Checkpoint, readConfig, type Tensor } from '@rankwise/core'
import { expectClose, referencePath, relativeRms } from '@rankwise/fixtures'
import { describe, expect, it } from 'vitest'
import { Mistral3ForConditionalGeneration } from '../src/mistral3.ts'
import { MutantBackend, type Mutation, swapRows, withAttributes } from './mutant-backend.ts'
import { codeOf } from './support.ts'
import { textGoldens } from './text-goldens.ts'

/** float32 kernels stay below 1e-6. */
const TOLERANCE = { relativeRms: 5e-6 }

const FOLDER = referencePath('flux2-tiny', 'text_encoder')
const OUT_LAYERS = [10, 20, 30]

const load = (backend: Backend) => Mistral3ForConditionalGeneration.fromPretrained(FOLDER, { backend })
const goldens = textGoldens('flux2-tiny', 'len128')

describe('goldens of transformers', () => {
  it.each([128, 512])('prompt embeddings of %i tokens, rows of padding included', async (length) => {
    const { inputs, embeds } = await goldens.prompts(length)
    await using backend = await ort({ device: 'cpu' })
    await using encoder = await load(backend)
    expectClose(await encoder.encode(inputs), embeds, TOLERANCE)
  })

  it.each([0, 1, 2, 5, 10, 20, 29, 30])('the hidden state behind %i layers', async (k) => {
    await using backend = await ort({ device: 'cpu' })
    await using encoder = await load(backend)
    const state = await encoder.encode(await goldens.inputs(), { outLayers: [k] })
    expectClose(state, await goldens.states([k]), TOLERANCE)
  })

  it('rows of padding ahead of the text are all alike', async () => {
    await using backend = await ort({ device: 'cpu' })
    await using encoder = await load(backend)
    const inputs = await goldens.inputs()
    const rows = rowsOf(await encoder.encode(inputs))
    const padding = inputs.attentionMask.data.indexOf(1)
    expect(padding).toBeGreaterThan(1)
    for (const row of rows.slice(0, padding)) expect(row).toEqual(rows[0])
    expect(rows[padding]).not.toEqual(rows[0])
  })
})

function rowsOf({ shape, data }: Tensor): readonly number[][] {
  const width = shape.at(-1) as number
  return Array.from({ length: data.length / width }, (_, i) => [
    ...(data.slice(i * width, (i + 1) * width) as Float32Array),
  ])
}

describe('a wrong computation is noticed', () => {
  const swapHalves = (name: RegExp): Mutation => ({
    weight: (weight, weightName) => (name.test(weightName) ? swapRows(weight) : weight),
  })
  const mutants: Record<string, Mutation> = {
    'epsilon of the norms': withAttributes('rms_norm', { eps: 1e-6 }),
    'rotation of neighbouring pairs': withAttributes('rope', { interleaved: true }),
    'scale of the attention': withAttributes('attention', { scale: 1 }),
    'padding not masked': {
      node: (node) =>
        node.op === 'attention'
          ? { ...node, inputs: node.inputs.slice(0, 3), attributes: { ...node.attributes, causal: true } }
          : node,
    },
    'values of the wrong group': swapHalves(/v_proj/),
  }

  it.each(Object.entries(mutants))('%s', async (_name, mutation) => {
    await using encoder = await load(new MutantBackend(mutation))
    const difference = relativeRms(await encoder.encode(await goldens.inputs()), await goldens.states(OUT_LAYERS))
    expect(difference).toBeGreaterThan(TOLERANCE.relativeRms)
  })
})

describe('weights', () => {
  it.each([
    { type: Mistral3ForConditionalGeneration, depth: 30 },
    { type: Mistral3ForConditionalGeneration.withOutLayers([3, 12]), depth: 12 },
  ])('of $depth layers have the names and shapes of the checkpoint', async ({ type, depth }) => {
    const model = type.fromConfig(await readConfig(FOLDER))
    await using checkpoint = await Checkpoint.open(FOLDER, { weightsName: type.weightsName })
    const isIgnored = (name: string) => type.ignoredWeights.some((pattern) => pattern.test(name))
    const stored = [...checkpoint.tensors]
      .filter(([name]) => !isIgnored(name))
      .map(([name, { shape }]) => [name, shape])
    const shapes = [...model.namedParameters()].map(([name, { shape }]) => [name, shape])
    expect(Object.fromEntries(shapes)).toEqual(Object.fromEntries(stored))
    expect(stored).toHaveLength(1 + 9 * depth)
  })

  it('of later layers, head, vision tower and projector are not loaded', async () => {
    await using backend = await ort({ device: 'cpu' })
    await using encoder = await load(backend)
    const elements = [...encoder.namedParameters()]
      .map(([, { shape }]) => shape.reduce((a, b) => a * b))
      .reduce((a, b) => a + b)
    const { localBytes, readBytes, mappedBytes } = encoder.loadReport
    expect(localBytes).toBe(4 * elements)
    expect(readBytes + mappedBytes).toBe(4 * elements)
  })

  it.each(['language_model.lm_head.weight', 'lm_head.weight', 'language_model.model.layers.30.mlp.up_proj.weight'])(
    '%s is known and left in the checkpoint',
    (name) => {
      expect(Mistral3ForConditionalGeneration.ignoredWeights.some((pattern) => pattern.test(name))).toBe(true)
    },
  )

  it('that are needed are not taken for later ones', () => {
    const { ignoredWeights } = Mistral3ForConditionalGeneration
    for (const name of [
      'language_model.model.layers.29.mlp.up_proj.weight',
      'language_model.model.embed_tokens.weight',
    ]) {
      expect(ignoredWeights.some((pattern) => pattern.test(name))).toBe(false)
    }
  })
})

describe('config', () => {
  const base = {
    vocab_size: 100,
    hidden_size: 48,
    intermediate_size: 96,
    num_hidden_layers: 40,
    num_attention_heads: 4,
    num_key_value_heads: 2,
    rope_theta: 1e9,
    sliding_window: null,
  }
  const configOf = (change: object = {}) =>
    Mistral3ForConditionalGeneration.fromConfig({ model_type: 'mistral3', text_config: { ...base, ...change } }).config

  it('gives heads a width of their own, or their share of the hidden size', () => {
    expect(configOf({ head_dim: 32 })).toMatchObject({ headDim: 32, rmsNormEps: 1e-6, ropeTheta: 1e9 })
    expect(configOf({ head_dim: null })).toMatchObject({ headDim: 12, numKeyValueHeads: 2 })
    expect(configOf({ num_attention_heads: 16, num_key_value_heads: undefined, head_dim: 2 })).toMatchObject({
      numKeyValueHeads: 8,
    })
  })

  it.each([
    [{ model_type: 'ministral3' }],
    [{ hidden_act: 'gelu' }],
    [{ sliding_window: 4096 }],
    // transformers takes windows of 4096 tokens then.
    [{ sliding_window: undefined }],
    [{ rope_scaling: { rope_type: 'yarn', factor: 4 } }],
    [{ rope_parameters: { rope_theta: 1e6, rope_type: 'llama3' } }],
  ])('that is not implemented is refused: %j', async (change) => {
    expect(await codeOf(() => configOf(change))).toBe('CONFIG_UNSUPPORTED')
  })

  it.each([
    [{ hidden_size: undefined }],
    [{ rope_theta: undefined }],
    [{ num_key_value_heads: 3 }],
    [{ head_dim: 31 }],
    [{ hidden_size: 50 }],
  ])('that is wrong is refused: %j', async (change) => {
    expect(await codeOf(() => configOf(change))).toBe('CONFIG_INVALID')
  })

  it('of another class, or without a language model, is refused', async () => {
    const { fromConfig } = Mistral3ForConditionalGeneration
    expect(await codeOf(() => fromConfig({ model_type: 'mistral', ...base }))).toBe('CONFIG_UNSUPPORTED')
    expect(await codeOf(() => fromConfig({ model_type: 'mistral3' }))).toBe('CONFIG_INVALID')
  })

  it.each([[[]], [[-1]], [[40]]])('refuses hidden states that are not there: %j', async (outLayers) => {
    const type = Mistral3ForConditionalGeneration.withOutLayers(outLayers)
    expect(await codeOf(() => type.fromConfig({ text_config: base }))).toBe('OUT_LAYERS')
  })
})

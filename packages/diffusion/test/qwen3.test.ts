import { fileURLToPath } from 'node:url'
import { ort } from '@rankwise/backend-ort'
import {
  type Backend,
  Checkpoint,
  checkPlan,
  legalDegreesOf,
  type Module,
  readConfig,
  Tensor,
  type TensorParallelPlan,
} from '@rankwise/core'
import { expectClose, referencePath, relativeRms } from '@rankwise/fixtures'
import { describe, expect, it } from 'vitest'
import { causalAttentionBias } from '../src/decoder/attention-bias.ts'
import { rotaryTables } from '../src/decoder/rotary-tables.ts'
import { Qwen3ForCausalLM } from '../src/qwen3.ts'
import { MutantBackend, type Mutation, swapRows, withAttributes } from './mutant-backend.ts'
import { codeOf } from './support.ts'
import { padded, textGoldens } from './text-goldens.ts'

/** float32 kernels stay below 1e-6. */
const TOLERANCE = { relativeRms: 5e-6 }

const FOLDER = referencePath('flux2-klein-tiny', 'text_encoder')
const DEMO_FOLDER = fileURLToPath(new URL('../../demo-flux2/pipeline/text_encoder', import.meta.url))
const OUT_LAYERS = [9, 18, 27]

const load = (backend: Backend) => Qwen3ForCausalLM.fromPretrained(FOLDER, { backend })

const goldens = textGoldens('flux2-klein-tiny', 'len96')
const goldenInputs = () => goldens.inputs()
const goldenStates = (layers: readonly number[]) => goldens.states(layers)

describe('goldens of transformers', () => {
  it.each([128, 512])('prompt embeddings of %i tokens, rows of padding included', async (length) => {
    const { inputs, embeds: expected } = await goldens.prompts(length)
    await using backend = await ort({ device: 'cpu' })
    await using encoder = await load(backend)
    expectClose(await encoder.encode(inputs), expected, TOLERANCE)
  })

  it.each([0, 1, 2, 5, 9, 18, 26, 27])('the hidden state behind %i layers', async (k) => {
    await using backend = await ort({ device: 'cpu' })
    await using encoder = await load(backend)
    expectClose(await encoder.encode(await goldenInputs(), { outLayers: [k] }), await goldenStates([k]), TOLERANCE)
  })
})

describe('a wrong computation is noticed', () => {
  const changeAttention = (causal: boolean): Mutation => ({
    node: (node) =>
      node.op === 'attention'
        ? { ...node, inputs: node.inputs.slice(0, 3), attributes: { ...node.attributes, causal } }
        : node,
  })
  const swapHalves = (name: RegExp): Mutation => ({
    weight: (weight, weightName) => (name.test(weightName) ? swapRows(weight) : weight),
  })
  const mutants: Record<string, Mutation> = {
    'epsilon of the norms': withAttributes('rms_norm', { eps: 1e-5 }),
    'rotation of neighbouring pairs': withAttributes('rope', { interleaved: true }),
    'scale of the attention': withAttributes('attention', { scale: 1 }),
    'no mask at all': changeAttention(false),
    'padding not masked': changeAttention(true),
    'keys of the wrong group': swapHalves(/k_proj/),
    'values of the wrong group': swapHalves(/v_proj/),
  }

  it.each(Object.entries(mutants))('%s', async (_name, mutation) => {
    await using encoder = await load(new MutantBackend(mutation))
    const difference = relativeRms(await encoder.encode(await goldenInputs()), await goldenStates(OUT_LAYERS))
    expect(difference).toBeGreaterThan(TOLERANCE.relativeRms)
  })

  it('hidden states of the layers before', async () => {
    await using backend = await ort({ device: 'cpu' })
    await using encoder = await load(backend)
    const embeds = await encoder.encode(await goldenInputs(), { outLayers: OUT_LAYERS.map((k) => k - 1) })
    expect(relativeRms(embeds, await goldenStates(OUT_LAYERS))).toBeGreaterThan(TOLERANCE.relativeRms)
  })
})

describe('weights', () => {
  it.each([
    { folder: FOLDER, type: Qwen3ForCausalLM, depth: 27 },
    { folder: DEMO_FOLDER, type: Qwen3ForCausalLM, depth: 27 },
    { folder: FOLDER, type: Qwen3ForCausalLM.withOutLayers([3, 12]), depth: 12 },
    { folder: FOLDER, type: Qwen3ForCausalLM.withOutLayers([0]), depth: 0 },
  ])('of $depth layers have the names and shapes of the checkpoint: $folder', async ({ folder, type, depth }) => {
    const model = type.fromConfig(await readConfig(folder))
    await using checkpoint = await Checkpoint.open(folder, { weightsName: type.weightsName })
    const isIgnored = (name: string) => type.ignoredWeights.some((pattern) => pattern.test(name))
    const stored = [...checkpoint.tensors]
      .filter(([name]) => !isIgnored(name))
      .map(([name, { shape }]) => [name, shape])
    expect(shapesOf(model)).toEqual(Object.fromEntries(stored))
    expect(stored).toHaveLength(1 + 11 * depth)
  })

  it('of later layers are not loaded', async () => {
    const type = Qwen3ForCausalLM.withOutLayers([2, 1])
    expect(type.name).toBe('Qwen3ForCausalLM')
    await using backend = await ort({ device: 'cpu' })
    await using encoder = await type.fromPretrained(FOLDER, { backend })
    const elements = [...encoder.namedParameters()].reduce(
      (sum, [, { shape }]) => sum + shape.reduce((a, b) => a * b),
      0,
    )
    expect(encoder.loadReport.localBytes).toBe(4 * elements)
    const { readBytes, mappedBytes } = encoder.loadReport
    expect(readBytes + mappedBytes).toBe(4 * elements)
    expectClose(await encoder.encode(await goldenInputs()), await goldenStates([2, 1]), TOLERANCE)
  })
})

function shapesOf(model: Module): Record<string, readonly number[]> {
  return Object.fromEntries([...model.namedParameters()].map(([name, { shape }]) => [name, shape]))
}

describe('the demo pipeline', () => {
  it('is encoded from bfloat16 weights', async () => {
    await using backend = await ort({ device: 'cpu' })
    await using encoder = await Qwen3ForCausalLM.fromPretrained(DEMO_FOLDER, { backend })
    const embeds = await encoder.encode(padded([[1, 2, 3]], 32, { side: 'right', padTokenId: 1254 }))
    expect(embeds.dtype).toBe('float32')
    expect(embeds.shape).toEqual([1, 32, 192])
    expect(embeds.data.every((value) => Number.isFinite(value))).toBe(true)
  })
})

describe('config', () => {
  const base = {
    vocab_size: 100,
    hidden_size: 48,
    intermediate_size: 96,
    num_hidden_layers: 36,
    num_attention_heads: 4,
    num_key_value_heads: 2,
    head_dim: 32,
    rope_theta: 1e6,
  }

  it('of transformers 4 has the base of the rotary frequencies at the top', async () => {
    const current = { ...base, rope_theta: undefined, rope_parameters: { rope_theta: 5000, rope_type: 'default' } }
    expect(Qwen3ForCausalLM.fromConfig({ ...base, rope_scaling: null }).config.ropeTheta).toBe(1e6)
    expect(Qwen3ForCausalLM.fromConfig(current).config.ropeTheta).toBe(5000)
  })

  it('gives heads a width of their own', () => {
    expect(shapesOf(Qwen3ForCausalLM.fromConfig(base))).toMatchObject({
      'model.layers.0.self_attn.q_proj.weight': [128, 48],
      'model.layers.0.self_attn.v_proj.weight': [64, 48],
      'model.layers.26.self_attn.o_proj.weight': [48, 128],
      'model.layers.26.self_attn.k_norm.weight': [32],
    })
  })

  it('without key-value heads has as many as query heads', () => {
    const { config } = Qwen3ForCausalLM.fromConfig({ ...base, num_key_value_heads: null, head_dim: undefined })
    expect(config).toMatchObject({ numKeyValueHeads: 4, headDim: 128 })
  })

  it.each([
    [{ model_type: 'qwen2' }],
    [{ hidden_act: 'gelu' }],
    [{ attention_bias: true }],
    [{ use_sliding_window: true, sliding_window: 4096 }],
    [{ layer_types: ['full_attention', 'sliding_attention'] }],
    [{ rope_scaling: { rope_type: 'yarn', factor: 4 } }],
    [{ rope_scaling: { type: 'linear', factor: 2 } }],
    [{ rope_parameters: { rope_theta: 1e6, rope_type: 'llama3' } }],
  ])('that is not implemented is refused: %j', async (change) => {
    expect(await codeOf(() => Qwen3ForCausalLM.fromConfig({ ...base, ...change }))).toBe('CONFIG_UNSUPPORTED')
  })

  it.each([
    [{ hidden_size: undefined }],
    [{ rope_theta: undefined }],
    [{ num_key_value_heads: 3 }],
    [{ head_dim: 31 }],
    [{ num_hidden_layers: 0 }],
  ])('that is wrong is refused: %j', async (change) => {
    expect(await codeOf(() => Qwen3ForCausalLM.fromConfig({ ...base, ...change }))).toBe('CONFIG_INVALID')
  })

  it('must have more layers than the last hidden state, which else were normalised', async () => {
    expect(await codeOf(() => Qwen3ForCausalLM.fromConfig({ ...base, num_hidden_layers: 28 }))).toBe('no error')
    expect(await codeOf(() => Qwen3ForCausalLM.fromConfig({ ...base, num_hidden_layers: 27 }))).toBe('OUT_LAYERS')
  })

  it.each([[[]], [[-1]], [[1.5]], [[36]]])('refuses hidden states that are not there: %j', async (outLayers) => {
    expect(await codeOf(() => Qwen3ForCausalLM.withOutLayers(outLayers).fromConfig(base))).toBe('OUT_LAYERS')
  })
})

describe('arguments', () => {
  it('that do not fit the model are refused', async () => {
    await using backend = await ort({ device: 'cpu' })
    await using encoder = await load(backend)
    const { inputIds, attentionMask } = padded([[1, 2]], 4, { side: 'right', padTokenId: 1000 })
    const codes = [
      () => encoder.encode({ inputIds: inputIds.reshape([4]), attentionMask }),
      () => encoder.encode({ inputIds, attentionMask: attentionMask.reshape([2, 2]) }),
      () => encoder.encode({ inputIds: Tensor.int32([1, 4], [0, 1, 2, 1005]), attentionMask }),
      () => encoder.encode({ inputIds: Tensor.int32([1, 4], [0, 1, 2, -1]), attentionMask }),
      () => encoder.encode({ inputIds, attentionMask: Tensor.int32([1, 4], [1, 2, 0, 0]) }),
      () => encoder.encode({ inputIds, attentionMask }, { outLayers: [28] }),
      () => encoder.encode({ inputIds, attentionMask }, { signal: AbortSignal.abort() }),
    ].map(codeOf)
    expect(await Promise.all(codes)).toEqual([
      'TOKENS_SHAPE',
      'TOKENS_SHAPE',
      'TOKEN_ID',
      'TOKEN_ID',
      'ATTENTION_MASK',
      'OUT_LAYERS',
      'ABORTED',
    ])
  })
})

describe('attention bias', () => {
  it('hides later tokens and padding, on either side', () => {
    const x = Number.NEGATIVE_INFINITY
    const { shape, data } = causalAttentionBias(Tensor.int32([2, 3], [1, 1, 0, 0, 1, 1]))
    expect(shape).toEqual([2, 1, 3, 3])
    expect([...data]).toEqual([0, x, x, 0, 0, x, 0, 0, x, x, x, x, x, 0, x, x, 0, 0])
  })
})

describe('rotary tables', () => {
  it('turn the first pair by one radian a position and later ones less', () => {
    const { cos, sin } = rotaryTables(3, 4, 100)
    expect(cos.shape).toEqual([3, 2])
    expectClose(cos, [1, 1, Math.cos(1), Math.cos(0.1), Math.cos(2), Math.cos(0.2)], { absolute: 1e-7 })
    expectClose(sin, [0, 0, Math.sin(1), Math.sin(0.1), Math.sin(2), Math.sin(0.2)], { absolute: 1e-7 })
  })
})

describe('the plan', () => {
  const config = {
    vocab_size: 101,
    hidden_size: 48,
    intermediate_size: 96,
    num_hidden_layers: 28,
    num_attention_heads: 12,
    num_key_value_heads: 3,
    head_dim: 8,
    rope_theta: 1e6,
  }
  const model = Qwen3ForCausalLM.fromConfig(config)
  const check = (tpDegree: number, changes: TensorParallelPlan = {}) =>
    checkPlan(
      { name: 'Qwen3ForCausalLM', tensorParallelPlan: { ...Qwen3ForCausalLM.tensorParallelPlan, ...changes } },
      model,
      tpDegree,
      true,
    )

  it('takes degrees that divide the heads of keys and values, or that these divide', () => {
    expect(legalDegreesOf(Qwen3ForCausalLM, model)).toEqual([1, 3, 6, 12])
    expect(() => check(12)).not.toThrow()
    expect(() => check(2)).toThrow(
      expect.objectContaining({
        code: 'HEADS_NOT_DIVISIBLE',
        where: 'model.layers.0.self_attn.k_proj.weight',
        actual: { heads: 3, tpDegree: 2, legalDegrees: [1, 3, 6, 12] },
      }),
    )
  })

  const layer = 'model.layers.*'
  it.each<[string, TensorParallelPlan]>([
    ['PLACEMENT_ATTENTION', { [`${layer}.self_attn.k_proj`]: 'rowwise_split_input' }],
    ['PLACEMENT_RESHAPE', { [`${layer}.self_attn.v_proj`]: 'colwise' }],
    ['PLACEMENT_COLWISE_INPUT', { [`${layer}.self_attn.o_proj`]: 'colwise' }],
    ['PLACEMENT_ROWWISE_INPUT', { [`${layer}.mlp.gate_proj`]: 'rowwise' }],
    ['PLACEMENT_ELEMENTWISE', { [`${layer}.mlp.up_proj`]: 'rowwise_split_input' }],
    ['STYLE_EMBEDDING', { 'model.embed_tokens': 'rowwise' }],
    ['PLAN_NOT_LINEAR', { [`${layer}.self_attn.q_norm`]: 'colwise' }],
  ])('changed is refused with %s: %j', (code, changes) => {
    expect(() => check(6, changes)).toThrow(expect.objectContaining({ code }))
  })
})

import { z } from 'zod'
import { parseModelConfig } from '../model-config.ts'

/** Config of a `Qwen3ForCausalLM`: what decides the shape of its decoder layers. */
export interface Qwen3Config {
  readonly vocabSize: number
  readonly hiddenSize: number
  readonly intermediateSize: number
  readonly numHiddenLayers: number
  readonly numAttentionHeads: number
  /** Heads of keys and values, each shared by `numAttentionHeads / numKeyValueHeads` query heads. */
  readonly numKeyValueHeads: number
  /** @default 128, whatever hiddenSize and numAttentionHeads are */
  readonly headDim: number
  /** @default 1e-6 */
  readonly rmsNormEps: number
  /** Base of the rotary frequencies. */
  readonly ropeTheta: number
}

const unscaledRope = {
  rope_type: z.literal('default').optional(),
  // The name before transformers 4.43.
  type: z.literal('default').optional(),
}

const schema = z
  .object({
    modelType: z.literal('qwen3').default('qwen3'),
    vocabSize: z.int().positive(),
    hiddenSize: z.int().positive(),
    intermediateSize: z.int().positive(),
    numHiddenLayers: z.int().positive(),
    numAttentionHeads: z.int().positive(),
    numKeyValueHeads: z.int().positive().nullish(),
    headDim: z.int().positive().multipleOf(2).default(128),
    rmsNormEps: z.number().positive().default(1e-6),
    hiddenAct: z.literal('silu').default('silu'),
    attentionBias: z.literal(false).default(false),
    useSlidingWindow: z.literal(false).default(false),
    layerTypes: z.array(z.literal('full_attention')).nullish(),
    // transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
    ropeParameters: z.object({ ...unscaledRope, rope_theta: z.number().positive().optional() }).nullish(),
    ropeTheta: z.number().positive().optional(),
    ropeScaling: z.object(unscaledRope).nullish(),
  })
  .refine(
    ({ ropeParameters, ropeTheta }) => (ropeParameters?.rope_theta ?? ropeTheta) !== undefined,
    'there is a rope_theta, in rope_parameters or beside it',
  )
  .refine(
    ({ numAttentionHeads, numKeyValueHeads }) => numAttentionHeads % (numKeyValueHeads ?? numAttentionHeads) === 0,
    'numKeyValueHeads divides numAttentionHeads',
  )

/**
 * The config in a `config.json` of transformers.
 *
 * @throws RankwiseError `CONFIG_INVALID`; `CONFIG_UNSUPPORTED` for sliding windows, biases, other activations and
 *   scaled rotary frequencies
 */
export function parseQwen3Config(config: unknown): Qwen3Config {
  const fields = parseModelConfig(schema, config, 'Qwen3ForCausalLM')
  return {
    vocabSize: fields.vocabSize,
    hiddenSize: fields.hiddenSize,
    intermediateSize: fields.intermediateSize,
    numHiddenLayers: fields.numHiddenLayers,
    numAttentionHeads: fields.numAttentionHeads,
    numKeyValueHeads: fields.numKeyValueHeads ?? fields.numAttentionHeads,
    headDim: fields.headDim,
    rmsNormEps: fields.rmsNormEps,
    ropeTheta: (fields.ropeParameters?.rope_theta ?? fields.ropeTheta) as number,
  }
}

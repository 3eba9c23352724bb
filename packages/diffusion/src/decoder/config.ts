import { z } from 'zod'

/** What decides the shape of a decoder's layers. */
export interface DecoderConfig {
  readonly vocabSize: number
  readonly hiddenSize: number
  readonly intermediateSize: number
  readonly numHiddenLayers: number
  readonly numAttentionHeads: number
  /** Heads of keys and values, each shared by `numAttentionHeads / numKeyValueHeads` query heads. */
  readonly numKeyValueHeads: number
  /** Width of a head, whatever hiddenSize and numAttentionHeads are. */
  readonly headDim: number
  /** @default 1e-6 */
  readonly rmsNormEps: number
  /** Base of the rotary frequencies. */
  readonly ropeTheta: number
  /** Whether queries and keys are normalised head by head. */
  readonly normalizesHeads: boolean
}

const unscaledRope = {
  rope_type: z.literal('default').optional(),
  // The name before transformers 4.43.
  type: z.literal('default').optional(),
}

/** Fields of a decoder's `config.json`, by their camelCase names, that Qwen3 and Mistral have in common. */
export const decoderFields = {
  vocabSize: z.int().positive(),
  hiddenSize: z.int().positive(),
  intermediateSize: z.int().positive(),
  numHiddenLayers: z.int().positive(),
  numAttentionHeads: z.int().positive(),
  numKeyValueHeads: z.int().positive().nullish(),
  headDim: z.int().positive().nullish(),
  rmsNormEps: z.number().positive().default(1e-6),
  hiddenAct: z.literal('silu').default('silu'),
  // transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
  ropeParameters: z.object({ ...unscaledRope, rope_theta: z.number().positive().optional() }).nullish(),
  ropeTheta: z.number().positive().optional(),
  ropeScaling: z.object(unscaledRope).nullish(),
} satisfies z.core.$ZodShape

type DecoderFields = z.output<z.ZodObject<typeof decoderFields>>

/** What no field of a decoder's config says alone. */
export function checkDecoder(fields: DecoderFields, context: z.RefinementCtx): void {
  const { numAttentionHeads, numKeyValueHeads, headDim } = decoderConfig(fields)
  if (ropeTheta(fields) === undefined) {
    context.addIssue({ code: 'custom', message: 'there is a rope_theta, in rope_parameters or beside it' })
  }
  if (numAttentionHeads % numKeyValueHeads !== 0) {
    context.addIssue({ code: 'custom', message: 'numKeyValueHeads divides numAttentionHeads' })
  }
  // Rotary embeddings turn pairs of its elements.
  if (headDim % 2 !== 0) context.addIssue({ code: 'custom', path: ['headDim'], message: 'headDim is even' })
}

/** The config that checked fields stand for. */
export function decoderConfig(fields: DecoderFields): Omit<DecoderConfig, 'normalizesHeads'> {
  const { vocabSize, hiddenSize, intermediateSize, numHiddenLayers, numAttentionHeads, rmsNormEps } = fields
  return {
    vocabSize,
    hiddenSize,
    intermediateSize,
    numHiddenLayers,
    numAttentionHeads,
    numKeyValueHeads: fields.numKeyValueHeads ?? numAttentionHeads,
    headDim: fields.headDim ?? hiddenSize / numAttentionHeads,
    rmsNormEps,
    ropeTheta: ropeTheta(fields) as number,
  }
}

function ropeTheta({ ropeParameters, ropeTheta: beside }: DecoderFields): number | undefined {
  return ropeParameters?.rope_theta ?? beside
}

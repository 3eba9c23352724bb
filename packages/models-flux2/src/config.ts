import { parseModelConfig } from '@rankwise/diffusion'
import { z } from 'zod'

const schema = z
  .object({
    patchSize: z.literal(1).default(1),
    inChannels: z.int().positive().default(128),
    outChannels: z.int().positive().nullish(),
    numLayers: z.int().nonnegative().max(1000).default(8),
    numSingleLayers: z.int().nonnegative().max(1000).default(48),
    attentionHeadDim: z.int().positive().multipleOf(2).max(4096).default(128),
    numAttentionHeads: z.int().positive().max(4096).default(48),
    jointAttentionDim: z.int().positive().default(15360),
    timestepGuidanceChannels: z.int().positive().multipleOf(2).default(256),
    mlpRatio: z.number().positive().max(64).default(3),
    axesDimsRope: z.array(z.int().positive().multipleOf(2)).length(4).default([32, 32, 32, 32]),
    ropeTheta: z.number().positive().default(2000),
    eps: z.number().positive().default(1e-6),
    guidanceEmbeds: z.boolean().default(true),
  })
  .refine((config) => config.axesDimsRope.reduce((sum, dim) => sum + dim, 0) === config.attentionHeadDim, {
    path: ['axesDimsRope'],
    message: 'the dims of the axes add up to attentionHeadDim',
  })

/** Config of a FLUX.2 transformer. */
export interface Flux2TransformerConfig {
  readonly inChannels: number
  readonly outChannels: number
  /** Double-stream blocks. */
  readonly numLayers: number
  /** Single-stream blocks. */
  readonly numSingleLayers: number
  readonly attentionHeadDim: number
  readonly numAttentionHeads: number
  /** Width of the text encoder's output. */
  readonly jointAttentionDim: number
  readonly timestepGuidanceChannels: number
  readonly mlpRatio: number
  /** How much of attentionHeadDim each position axis (T, H, W, L) turns. */
  readonly axesDimsRope: readonly number[]
  readonly ropeTheta: number
  readonly eps: number
  /** Whether the guidance scale is embedded (FLUX.2-dev). */
  readonly guidanceEmbeds: boolean
}

/**
 * Reads a transformer's config.json; what it leaves out is as in FLUX.2-dev.
 *
 * @throws RankwiseError `CONFIG_INVALID` naming every field that is wrong, `CONFIG_UNSUPPORTED`
 */
export function parseFlux2TransformerConfig(json: unknown): Flux2TransformerConfig {
  const parsed = parseModelConfig(schema, json, 'Flux2Transformer2DModel')
  return { ...parsed, outChannels: parsed.outChannels ?? parsed.inChannels }
}

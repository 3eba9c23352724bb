import { z } from 'zod'
import { parseModelConfig } from '../model-config.ts'

/** Config of an `AutoencoderKLFlux2`. Defaults are diffusers', which are those of the real FLUX.2 autoencoder. */
export interface AutoencoderKLFlux2Config {
  /** Channels of the images that `encode` takes. @default 3 */
  readonly inChannels: number
  /** Channels of the images that `decode` gives. @default 3 */
  readonly outChannels: number
  /** Channels of the encoder at each resolution, from that of the image down. @default [128, 256, 512, 512] */
  readonly blockOutChannels: readonly number[]
  /** The same of the decoder; null where it has the encoder's. @default null */
  readonly decoderBlockOutChannels: readonly number[] | null
  /** Resnet blocks of the encoder at each resolution; the decoder has one more. @default 2 */
  readonly layersPerBlock: number
  /** Channels of the latents. @default 32 */
  readonly latentChannels: number
  /** Groups of every group norm. @default 32 */
  readonly normNumGroups: number
  /** Whether encoder and decoder have attention at the lowest resolution. @default true */
  readonly midBlockAddAttention: boolean
  /** Whether a 1x1 convolution follows the encoder. @default true */
  readonly useQuantConv: boolean
  /** Whether a 1x1 convolution precedes the decoder. @default true */
  readonly usePostQuantConv: boolean
  /** Side of a tile in pixels, unless `enableTiling` says otherwise. @default 1024 */
  readonly sampleSize: number
  /** Added to the variance of the latents before its root. @default 1e-4 */
  readonly batchNormEps: number
}

const DEFAULT_CHANNELS = [128, 256, 512, 512]

const channels = z.array(z.int().positive()).min(1)

// `batch_norm_momentum` (training) and `force_upcast` (other pipelines) do not enter inference.
const schema = z
  .object({
    inChannels: z.int().positive().default(3),
    outChannels: z.int().positive().default(3),
    blockOutChannels: channels.default(DEFAULT_CHANNELS),
    decoderBlockOutChannels: channels.nullable().default(null),
    downBlockTypes: z.array(z.literal('DownEncoderBlock2D')).default(DEFAULT_CHANNELS.map(() => 'DownEncoderBlock2D')),
    upBlockTypes: z.array(z.literal('UpDecoderBlock2D')).default(DEFAULT_CHANNELS.map(() => 'UpDecoderBlock2D')),
    layersPerBlock: z.int().positive().default(2),
    actFn: z.literal('silu').default('silu'),
    latentChannels: z.int().positive().default(32),
    normNumGroups: z.int().positive().default(32),
    midBlockAddAttention: z.boolean().default(true),
    useQuantConv: z.boolean().default(true),
    usePostQuantConv: z.boolean().default(true),
    // Of a list of sides, diffusers takes the first.
    sampleSize: z
      .union([
        z.int().positive(),
        z
          .array(z.int().positive())
          .min(1)
          .transform((sides) => sides[0] as number),
      ])
      .default(1024),
    batchNormEps: z.number().positive().default(1e-4),
    // The statistics of the latents are those of 2x2 patches, and pipelines fold latents so.
    patchSize: z.tuple([z.literal(2), z.literal(2)]).default([2, 2]),
  })
  .refine(
    ({ blockOutChannels, decoderBlockOutChannels, downBlockTypes, upBlockTypes }) =>
      [decoderBlockOutChannels ?? blockOutChannels, downBlockTypes, upBlockTypes].every(
        ({ length }) => length === blockOutChannels.length,
      ),
    'encoder and decoder have as many blocks as blockOutChannels has entries',
  )
  .refine(
    ({ blockOutChannels, decoderBlockOutChannels, normNumGroups }) =>
      [...blockOutChannels, ...(decoderBlockOutChannels ?? [])].every((size) => size % normNumGroups === 0),
    'normNumGroups divides the channels of every block',
  )

/**
 * The config in a `config.json` of diffusers.
 *
 * @throws RankwiseError `CONFIG_INVALID`; `CONFIG_UNSUPPORTED` for other blocks, activations and patches
 */
export function parseAutoencoderKLFlux2Config(config: unknown): AutoencoderKLFlux2Config {
  const { downBlockTypes, upBlockTypes, actFn, patchSize, ...fields } = parseModelConfig(
    schema,
    config,
    'AutoencoderKLFlux2',
  )
  return fields
}

import type { Tensor } from '@rankwise/core'
import type { Generator, ImageInput } from '@rankwise/diffusion'
import type { LatentTensor } from './latent-tensor.ts'

/** What a step of the denoising leaves behind. */
export interface DenoisingStep {
  /** 0-based. */
  readonly step: number
  readonly totalSteps: number
  /** Timestep the step started from, in 0 .. 1000. */
  readonly timestep: number
  /** Packed latents after the step, `[batch, tokens, channels]` in the dtype of the transformer. */
  readonly latents: LatentTensor
}

/** Forms in which a pipeline returns what it draws. */
export type OutputType = 'image' | 'array' | 'latent'

/** Options of a call that all FLUX.2 pipelines take, by diffusers' names. */
export interface Flux2CallOptions<T extends OutputType = OutputType> {
  /** One prompt, or one per picture. Give it or `promptEmbeds`. */
  readonly prompt?: string | readonly string[]
  /** Instead of a prompt: `[batch, textTokens, jointAttentionDim]`, cast to the dtype of the transformer. */
  readonly promptEmbeds?: Tensor
  /**
   * Reference images: an `Image`, the path of a PNG or JPEG or the bytes of one, or several of these. They are scaled down
   * to an area of 1024 x 1024 pixels where they are larger, and cut to whole tokens.
   */
  readonly image?: ImageInput | readonly ImageInput[]
  /** Pixels. @default that of the first reference image, otherwise 128 * vaeScaleFactor (1024) */
  readonly height?: number
  /** Pixels. @default that of the first reference image, otherwise 128 * vaeScaleFactor (1024) */
  readonly width?: number
  /** @default 50; of `Flux2KleinKVPipeline`, 4 */
  readonly numInferenceSteps?: number
  /** Noise levels before shifting, one per step. @default evenly from 1 to 1 / numInferenceSteps */
  readonly sigmas?: readonly number[]
  /** @default 1 */
  readonly numImagesPerPrompt?: number
  /** Source of the noise, or one per picture; the same on all ranks. @default seeded at random on rank 0 */
  readonly generator?: Generator | readonly Generator[]
  /**
   * Instead of drawn noise: `[batch, 4 * latentChannels, height / (2 * vaeScaleFactor), width / …]`, cast to the dtype of
   * the transformer.
   */
  readonly latents?: Tensor
  /** Text tokens, padded or truncated to. @default 512 */
  readonly maxSequenceLength?: number
  /**
   * Layers of the text encoder whose outputs are joined. @default [10, 20, 30] of `Flux2Pipeline`, otherwise [9, 18, 27]
   */
  readonly textEncoderOutLayers?: readonly number[]
  /**
   * `image` gives Images; `array` a float32 tensor `[batch, height, width, 3]` in [0, 1]; `latent` what
   * `Flux2Output.images` says. @default 'image'
   */
  readonly outputType?: T
  /**
   * Called after every step; a tensor it returns replaces the latents, of which it has the shape. One of another dtype
   * keeps it until the next step, as in diffusers: the step then starts from unrounded values.
   */
  readonly callbackOnStepEnd?: (step: DenoisingStep) => LatentTensor | undefined | Promise<LatentTensor | undefined>
  /** Aborts the call with `ABORTED`. */
  readonly signal?: AbortSignal
}

/** Options of a call of `Flux2Pipeline`. */
export interface Flux2Options<T extends OutputType = OutputType> extends Flux2CallOptions<T> {
  /** How closely the picture follows the prompt; the model takes it as an input, at no cost. @default 4 */
  readonly guidanceScale?: number
}

/** Options of a call of `Flux2KleinPipeline`. */
export interface Flux2KleinOptions<T extends OutputType = OutputType> extends Flux2CallOptions<T> {
  /**
   * How far the prompt pulls away from the empty one; above 1 it costs a second forward. Ignored by distilled models.
   * @default 4
   */
  readonly guidanceScale?: number
  /** Instead of those of the empty prompt, for models that are not distilled; cast as `promptEmbeds` is. */
  readonly negativePromptEmbeds?: Tensor
}

/** An option of a call of any FLUX.2 pipeline. */
export type OptionName = keyof Flux2Options | keyof Flux2KleinOptions

const COMMON_OPTIONS: Readonly<Record<keyof Flux2CallOptions, true>> = {
  prompt: true,
  promptEmbeds: true,
  image: true,
  height: true,
  width: true,
  numInferenceSteps: true,
  sigmas: true,
  numImagesPerPrompt: true,
  generator: true,
  latents: true,
  maxSequenceLength: true,
  textEncoderOutLayers: true,
  outputType: true,
  callbackOnStepEnd: true,
  signal: true,
}

/** Names of the options that all FLUX.2 pipelines take. */
export const CALL_OPTIONS = Object.keys(COMMON_OPTIONS) as readonly (keyof Flux2CallOptions)[]

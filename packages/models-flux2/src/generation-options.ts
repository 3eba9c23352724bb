import { RankwiseError, type Tensor } from '@rankwise/core'
import { type Generator, linspace } from '@rankwise/diffusion'

/** What a step of the denoising leaves behind. */
export interface DenoisingStep {
  /** 0-based. */
  readonly step: number
  readonly totalSteps: number
  /** Timestep the step started from, in 0 .. 1000. */
  readonly timestep: number
  /** Packed latents after the step, float32 `[batch, tokens, channels]`. */
  readonly latents: Tensor<'float32'>
}

/** Options of a call, by diffusers' names. */
export interface Flux2KleinOptions<T extends OutputType = OutputType> {
  /** One prompt, or one per picture. Give it or `promptEmbeds`. */
  readonly prompt?: string | readonly string[]
  /** Instead of a prompt: float32 `[batch, textTokens, jointAttentionDim]`. */
  readonly promptEmbeds?: Tensor
  /** Instead of those of the empty prompt, for models that are not distilled. */
  readonly negativePromptEmbeds?: Tensor
  /** Pixels. @default 128 * vaeScaleFactor (1024) */
  readonly height?: number
  /** Pixels. @default 128 * vaeScaleFactor (1024) */
  readonly width?: number
  /** @default 50 */
  readonly numInferenceSteps?: number
  /** Noise levels before shifting, one per step. @default evenly from 1 to 1 / numInferenceSteps */
  readonly sigmas?: readonly number[]
  /** How far the prompt pulls away from the empty one; above 1 it costs a second forward. Ignored by distilled models. @default 4 */
  readonly guidanceScale?: number
  /** @default 1 */
  readonly numImagesPerPrompt?: number
  /** Source of the noise, or one per picture. @default seeded at random; rank 0's noise is used by all ranks */
  readonly generator?: Generator | readonly Generator[]
  /** Instead of drawn noise: float32 `[batch, 4 * latentChannels, height / (2 * vaeScaleFactor), width / …]`. */
  readonly latents?: Tensor
  /** Text tokens, padded or truncated to. @default 512 */
  readonly maxSequenceLength?: number
  /** Layers of the text encoder whose outputs are joined. @default [9, 18, 27] */
  readonly textEncoderOutLayers?: readonly number[]
  /**
   * `image` gives Images; `array` a float32 tensor `[batch, height, width, 3]` in [0, 1]; `latent` the latents as the
   * VAE takes them. @default 'image'
   */
  readonly outputType?: T
  /** Called after every step; a tensor it returns replaces the latents. */
  readonly callbackOnStepEnd?: (
    step: DenoisingStep,
  ) => Tensor<'float32'> | undefined | Promise<Tensor<'float32'> | undefined>
  /** Aborts the call with `ABORTED`. */
  readonly signal?: AbortSignal
}

/** Forms in which a pipeline returns what it draws. */
export type OutputType = 'image' | 'array' | 'latent'

/** Options with all defaults filled in. */
export interface ResolvedOptions
  extends Required<
    Pick<
      Flux2KleinOptions,
      | 'height'
      | 'width'
      | 'numInferenceSteps'
      | 'guidanceScale'
      | 'numImagesPerPrompt'
      | 'maxSequenceLength'
      | 'textEncoderOutLayers'
      | 'outputType'
    >
  > {
  readonly sigmas: readonly number[]
}

/** Far beyond any use; a schedule is laid out before the first step. */
const MAX_STEPS = 100_000

const KNOWN_OPTIONS: Readonly<Record<keyof Flux2KleinOptions, true>> = {
  prompt: true,
  promptEmbeds: true,
  negativePromptEmbeds: true,
  height: true,
  width: true,
  numInferenceSteps: true,
  sigmas: true,
  guidanceScale: true,
  numImagesPerPrompt: true,
  generator: true,
  latents: true,
  maxSequenceLength: true,
  textEncoderOutLayers: true,
  outputType: true,
  callbackOnStepEnd: true,
  signal: true,
}

/**
 * Checks the options of a call and fills in the defaults; nothing has been computed yet.
 *
 * @param pixelsPerToken - height and width of the picture that one token stands for
 * @param defaultSize - pixels of a side that is not given
 * @throws RankwiseError `OPTION_UNKNOWN`, `OPTION_INVALID`, `PROMPT_MISSING`
 */
export function resolveOptions(
  options: Flux2KleinOptions,
  { pixelsPerToken, defaultSize }: { readonly pixelsPerToken: number; readonly defaultSize: number },
): ResolvedOptions {
  checkNames(options)
  const steps = options.numInferenceSteps ?? options.sigmas?.length ?? 50
  const numInferenceSteps = positiveInteger('numInferenceSteps', steps, MAX_STEPS)
  checkSigmas(options.sigmas ?? [])
  const guidanceScale = options.guidanceScale ?? 4
  if (!Number.isFinite(guidanceScale)) throw invalid('guidanceScale', guidanceScale, 'a finite number')
  const outputType = options.outputType ?? 'image'
  if (!['image', 'array', 'latent'].includes(outputType))
    throw invalid('outputType', outputType, 'image, array or latent')
  return {
    height: wholeTokens('height', options.height ?? defaultSize, pixelsPerToken),
    width: wholeTokens('width', options.width ?? defaultSize, pixelsPerToken),
    numInferenceSteps,
    sigmas: options.sigmas ?? linspace(1, 1 / numInferenceSteps, numInferenceSteps),
    guidanceScale,
    numImagesPerPrompt: positiveInteger('numImagesPerPrompt', options.numImagesPerPrompt ?? 1),
    maxSequenceLength: positiveInteger('maxSequenceLength', options.maxSequenceLength ?? 512),
    textEncoderOutLayers: options.textEncoderOutLayers ?? [9, 18, 27],
    outputType,
  }
}

function checkSigmas(sigmas: readonly number[]): void {
  const bounded = sigmas.every((sigma) => sigma > 0 && sigma <= 1)
  const descending = sigmas.every((sigma, i) => i === 0 || sigma < (sigmas[i - 1] as number))
  if (!bounded || !descending) throw invalid('sigmas', sigmas.join(', '), 'a list of descending numbers in (0, 1]')
}

function checkNames(options: Flux2KleinOptions): void {
  for (const name of Object.keys(options)) {
    if (Object.hasOwn(KNOWN_OPTIONS, name)) continue
    throw new RankwiseError('OPTION_UNKNOWN', `there is no option '${name}'`, {
      where: name,
      actual: { known: Object.keys(KNOWN_OPTIONS) },
    })
  }
  if ((options.prompt === undefined) === (options.promptEmbeds === undefined)) {
    throw new RankwiseError('PROMPT_MISSING', 'give either prompt or promptEmbeds', { where: 'prompt' })
  }
}

/** Pixels rounded down to whole tokens, as diffusers does it, with a warning. */
function wholeTokens(name: string, pixels: number, pixelsPerToken: number): number {
  positiveInteger(name, pixels)
  const whole = Math.floor(pixels / pixelsPerToken) * pixelsPerToken
  if (whole === 0) throw invalid(name, pixels, `at least ${pixelsPerToken}`)
  if (whole !== pixels) {
    process.emitWarning(`${name} ${pixels} is not a multiple of ${pixelsPerToken}: the picture has ${whole}`, {
      code: 'SIZE_ROUNDED',
    })
  }
  return whole
}

function positiveInteger(name: string, value: number, most = Number.MAX_SAFE_INTEGER): number {
  if (!Number.isSafeInteger(value) || value < 1) throw invalid(name, value, 'a positive integer')
  if (value > most) throw invalid(name, value, `at most ${most}`)
  return value
}

function invalid(name: string, value: unknown, rule: string): RankwiseError {
  return new RankwiseError('OPTION_INVALID', `${name} cannot be ${String(value)}`, {
    where: name,
    rule: `${name} is ${rule}`,
  })
}

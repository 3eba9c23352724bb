import { createHash, type Hash } from 'node:crypto'
import { type DType, RankwiseError, Tensor, textOf } from '@rankwise/core'
import { Generator, linspace } from '@rankwise/diffusion'
import type { Flux2CallOptions, Flux2KleinOptions, OptionName, OutputType } from './generation-options.ts'
import { latentTensor } from './latent-tensor.ts'

/** What a call of any FLUX.2 pipeline may give. */
type GivenOptions = Flux2CallOptions & Flux2KleinOptions

/** What one pipeline makes of the options of a call. */
export interface CallTraits {
  /** Class of the pipeline. */
  readonly name: string
  readonly options: readonly OptionName[]
  readonly numInferenceSteps: number
  /** 1 for none. */
  readonly guidanceScale: number
  readonly textEncoderOutLayers: readonly number[]
}

/** Sizes that options have to fit, or are by default. */
export interface CallSizes {
  /** Height and width of the picture that one token stands for, in pixels. */
  readonly pixelsPerToken: number
  /** Pixels of sides that are not given. */
  readonly height: number
  readonly width: number
}

/** The options of a call, checked, with all defaults filled in. */
export interface Request {
  readonly prompts: readonly string[] | undefined
  readonly promptEmbeds: Tensor | undefined
  readonly negativePromptEmbeds: Tensor | undefined
  /** Pictures to draw. */
  readonly batch: number
  readonly height: number
  readonly width: number
  readonly numInferenceSteps: number
  readonly sigmas: readonly number[]
  readonly guidanceScale: number
  readonly numImagesPerPrompt: number
  readonly generator: Generator | readonly Generator[] | undefined
  readonly latents: Tensor | undefined
  readonly maxSequenceLength: number
  readonly textEncoderOutLayers: readonly number[]
  readonly outputType: OutputType
}

/** Far beyond any use; a schedule is laid out before the first step. */
const MAX_STEPS = 100_000

/**
 * Checks the options of a call and fills in the defaults; nothing has been computed yet.
 *
 * @throws RankwiseError `OPTION_INVALID`, `PROMPT_MISSING`, `GENERATOR_BATCH`, `DTYPE_UNSUPPORTED`
 */
export function requestOf(options: GivenOptions, traits: CallTraits, sizes: CallSizes): Request {
  const { promptEmbeds, negativePromptEmbeds, generator, latents, sigmas = [], outputType = 'image' } = options
  const prompts = promptsOf(options)
  for (const [name, given] of Object.entries({ promptEmbeds, negativePromptEmbeds, latents })) {
    if (given !== undefined) checkTensor(name, given)
  }
  checkSigmas(sigmas)
  const steps = options.numInferenceSteps ?? options.sigmas?.length ?? traits.numInferenceSteps
  const numInferenceSteps = positiveInteger('numInferenceSteps', steps, MAX_STEPS)
  const numImagesPerPrompt = positiveInteger('numImagesPerPrompt', options.numImagesPerPrompt ?? 1)
  const batch = (prompts?.length ?? promptEmbeds?.shape[0] ?? 0) * numImagesPerPrompt
  checkGenerators(generator, batch)
  const guidanceScale = options.guidanceScale ?? traits.guidanceScale
  if (!Number.isFinite(guidanceScale)) throw invalid('guidanceScale', guidanceScale, 'a finite number')
  if (!['image', 'array', 'latent'].includes(outputType))
    throw invalid('outputType', outputType, 'image, array or latent')
  return {
    prompts,
    promptEmbeds,
    negativePromptEmbeds,
    batch,
    height: wholeTokens('height', options.height ?? sizes.height, sizes.pixelsPerToken),
    width: wholeTokens('width', options.width ?? sizes.width, sizes.pixelsPerToken),
    numInferenceSteps,
    sigmas: options.sigmas ?? linspace(1, 1 / numInferenceSteps, numInferenceSteps),
    guidanceScale,
    numImagesPerPrompt,
    generator,
    latents,
    maxSequenceLength: positiveInteger('maxSequenceLength', options.maxSequenceLength ?? 512),
    textEncoderOutLayers: options.textEncoderOutLayers ?? traits.textEncoderOutLayers,
    outputType,
  }
}

/**
 * Hash of all that decides what is drawn. Ranks that draw different pictures would add parts of one to the other, and
 * nobody would notice.
 *
 * @param images - reference images, as they are encoded
 * @param dtypes - what the models of all ranks compute in
 */
export function fingerprintOf(
  request: Request,
  images: readonly Tensor[],
  dtypes: Readonly<Record<'transformer' | 'vae', DType>>,
): string {
  const { promptEmbeds, negativePromptEmbeds, latents, generator, ...plain } = request
  const hash = createHash('sha256').update(JSON.stringify([plain, dtypes]))
  for (const tensor of [promptEmbeds, negativePromptEmbeds, latents, ...images]) hashTensor(hash, tensor)
  const generators = generator instanceof Generator ? [generator] : (generator ?? [])
  hash.update(`${generators.length}`)
  // 16 numbers that come next tell generators apart; drawn from a copy, they are still to come.
  for (const each of generators) hashTensor(hash, each.cloneState().rand([16]))
  return hash.digest('hex')
}

function hashTensor(hash: Hash, tensor: Tensor | undefined): void {
  if (tensor === undefined) {
    hash.update('none')
    return
  }
  const { data, dtype, shape } = tensor
  hash.update(`${dtype}[${shape.join()}]`).update(new Uint8Array(data.buffer, data.byteOffset, data.byteLength))
}

function promptsOf({ prompt, promptEmbeds }: GivenOptions): readonly string[] | undefined {
  if ((prompt === undefined) === (promptEmbeds === undefined)) {
    throw new RankwiseError('PROMPT_MISSING', 'give either prompt or promptEmbeds', { where: 'prompt' })
  }
  if (prompt === undefined) return undefined
  const prompts = typeof prompt === 'string' ? [prompt] : prompt
  if (!Array.isArray(prompts) || prompts.length === 0 || !prompts.every((text) => typeof text === 'string')) {
    throw invalid('prompt', prompt, 'a string, or a list of at least one')
  }
  return prompts
}

function checkTensor(name: string, given: unknown): void {
  if (!(given instanceof Tensor)) throw invalid(name, given, 'a Tensor')
  latentTensor(given, name)
}

function checkSigmas(sigmas: readonly number[]): void {
  const bounded = Array.isArray(sigmas) && sigmas.every((sigma) => typeof sigma === 'number' && sigma > 0 && sigma <= 1)
  const descending = bounded && sigmas.every((sigma, i) => i === 0 || sigma < (sigmas[i - 1] as number))
  if (!descending) throw invalid('sigmas', sigmas, 'a list of descending numbers in (0, 1]')
}

function checkGenerators(generator: GivenOptions['generator'], batch: number): void {
  if (!Array.isArray(generator) || generator.length === batch) return
  throw new RankwiseError('GENERATOR_BATCH', 'there are not as many generators as pictures', {
    where: 'generator',
    actual: { generators: generator.length, pictures: batch },
    rule: 'one generator draws for all pictures, or each has its own',
  })
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
  return new RankwiseError('OPTION_INVALID', `${name} cannot be ${textOf(value)}`, {
    where: name,
    rule: `${name} is ${rule}`,
  })
}

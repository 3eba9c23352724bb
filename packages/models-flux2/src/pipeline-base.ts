import { profiled, type Shape, Turns, throwIfAborted } from '@rankwise/core'
import {
  type AutoencoderKLFlux2,
  type FlowMatchEulerDiscreteScheduler,
  type HiddenStateEncoder,
  type LatentDType,
  prepareLatentIds,
  type Tokenizer,
} from '@rankwise/diffusion'
import { together } from './agreement.ts'
import type { Flux2Components } from './components.ts'
import { type Conditions, encodePrompts, shareConditions } from './conditions.ts'
import { denoise, scheduleFor } from './denoising.ts'
import type { DenoisingStep, Flux2CallOptions, OutputType } from './generation-options.ts'
import { latentNoise, requireLatents } from './latent-noise.ts'
import { latentDTypeOf } from './latent-tensor.ts'
import { whileLoaded } from './on-demand-text-encoder.ts'
import { checkOptionNames } from './option-names.ts'
import { type Flux2Output, type LatentOutput, toOutput } from './output.ts'
import type { EncodePromptOptions, Prompt } from './prompt.ts'
import { encodeReferences, type ReferenceSamples, readReferences } from './reference-images.ts'
import { type CallTraits, fingerprintOf, type Request, requestOf } from './request.ts'
import type { Flux2Transformer2DModel } from './transformer.ts'
import type { Velocity } from './velocity.ts'

/** VAE latents per token, in each direction. */
const PATCH = 2

/** Side of the default picture, in VAE latents. */
const DEFAULT_SAMPLE_SIZE = 128

/** Calls that overlap on one rank need not overlap in the same way on another. */
const turns = new Turns()

/** What a pipeline does in a way of its own. */
export interface PipelineTraits extends CallTraits {
  readonly latentOutput: LatentOutput
}

/** A request and what follows from it alone. */
interface PreparedRequest {
  readonly request: Request
  readonly references: ReferenceSamples | undefined
  readonly scheduler: FlowMatchEulerDiscreteScheduler
  /** Of the patched latents, `[batch, channels, rows, columns]`. */
  readonly shape: Shape
  readonly dtypes: Readonly<Record<'transformer' | 'vae', LatentDType>>
}

/**
 * What the FLUX.2 pipelines share: a prompt and reference images become pictures, on all ranks together. Its methods are
 * called on functions that inherit from it (`callable`), so it has no members of its own that are `#private`.
 */
export abstract class Flux2PipelineBase<O extends Flux2CallOptions> implements Flux2Components, AsyncDisposable {
  readonly transformer: Flux2Transformer2DModel
  readonly textEncoder: HiddenStateEncoder
  readonly vae: AutoencoderKLFlux2
  readonly tokenizer: Tokenizer
  readonly scheduler: FlowMatchEulerDiscreteScheduler
  protected abstract get traits(): PipelineTraits

  constructor(components: Flux2Components) {
    this.transformer = components.transformer
    this.textEncoder = components.textEncoder
    this.vae = components.vae
    this.tokenizer = components.tokenizer
    this.scheduler = components.scheduler
  }

  /** Embeds prompts as the model was trained on them. */
  protected abstract encodePrompt(prompts: readonly string[], options: EncodePromptOptions): Promise<Prompt>

  /** What a call is denoised by. */
  protected abstract velocity(conditions: Conditions, request: Request): Velocity

  /** Whether a call needs the empty prompt as well. */
  protected isGuided(_request: Request): boolean {
    return false
  }

  /** Of several ranks, the one that warns. */
  protected get isFirstRank(): boolean {
    return (this.transformer.collectives?.rank ?? 0) === 0
  }

  /**
   * Draws pictures.
   *
   * @throws RankwiseError `OPTION_UNKNOWN`, `OPTION_INVALID`, `PROMPT_MISSING`, `PROMPT_EMBEDS_SHAPE`,
   *   `GENERATOR_BATCH`, `LATENTS_SHAPE`, `DTYPE_UNSUPPORTED`, `SCHEDULER_SIGMAS`, `OPTIONS_DIFFER`,
   *   `CALL_FAILED_ELSEWHERE`, `ABORTED`, and those of the models, the backend and the collectives
   */
  async generate<T extends OutputType = 'image'>(options: O & { readonly outputType?: T }): Promise<Flux2Output<T>> {
    const steps = this.steps(options)
    let next = await steps.next()
    while (next.done !== true) next = await steps.next()
    return next.value
  }

  /**
   * Draws pictures step by step: yields after every denoising step and returns the output. On several ranks the next call
   * waits for the end of this one, be it its last step or `return()`, as a loop that is left calls it.
   */
  async *steps<T extends OutputType = 'image'>(
    options: O & { readonly outputType?: T },
  ): AsyncGenerator<DenoisingStep, Flux2Output<T>, void> {
    const { signal, callbackOnStepEnd } = options
    const { collectives } = this.transformer
    using _turn = await turns.take(collectives)
    const prepared = await together(() => this.prepare(options), {
      collectives,
      fingerprint: ({ request, references, dtypes }) => fingerprintOf(request, references?.samples ?? [], dtypes),
    })
    const { request, scheduler, shape, dtypes } = prepared
    const conditions = await profiled({ category: 'stage', name: 'encode' }, () =>
      together(() => this.conditions(prepared, signal), { collectives }),
    )
    await shareConditions(conditions, collectives, signal)
    const noise = await latentNoise(shape, { ...request, dtype: dtypes.transformer, collectives, signal })
    const [, , rows, columns] = shape as readonly [number, number, number, number]
    const latents = yield* denoise({
      scheduler,
      velocity: this.velocity(conditions, request),
      noise,
      ids: prepareLatentIds(rows, columns),
      collectives,
      signal,
      callbackOnStepEnd,
    })
    throwIfAborted(signal)
    const { latentOutput } = this.traits
    const outputType = request.outputType as T
    const how = { outputType, latentOutput, rows, columns, vae: this.vae, collectives, signal }
    return profiled({ category: 'stage', name: 'decode' }, () => toOutput(latents, how))
  }

  /** Everything that can be refused before the models run. */
  private async prepare(options: O): Promise<PreparedRequest> {
    const { image, signal } = options
    throwIfAborted(signal)
    checkOptionNames(this.traits.name, options, this.traits.options)
    const references = image === undefined ? undefined : await readReferences(image, { vae: this.vae, signal })
    const pixelsPerToken = this.vae.vaeScaleFactor * PATCH
    const side = DEFAULT_SAMPLE_SIZE * this.vae.vaeScaleFactor
    const { height, width } = references ?? { height: side, width: side }
    const request = requestOf(options, this.traits, { pixelsPerToken, height, width })
    const [rows, columns] = [request.height / pixelsPerToken, request.width / pixelsPerToken]
    const shape = [request.batch, this.transformer.config.inChannels, rows, columns]
    requireLatents(request.latents, shape)
    const dtypes = { transformer: latentDTypeOf(this.transformer, 'transformer'), vae: latentDTypeOf(this.vae, 'vae') }
    return { request, references, scheduler: scheduleFor(this.scheduler, rows * columns, request), shape, dtypes }
  }

  private async conditions(
    { request, references, dtypes: { transformer: dtype } }: PreparedRequest,
    signal: AbortSignal | undefined,
  ): Promise<Conditions> {
    const prompts = await whileLoaded(this.textEncoder, () =>
      encodePrompts(request, {
        encode: (texts) => this.encodePrompt(texts, { ...request, warns: this.isFirstRank, signal }),
        width: this.transformer.config.jointAttentionDim,
        dtype,
        isGuided: this.isGuided(request),
      }),
    )
    if (references === undefined) return { ...prompts, references }
    const { collectives } = this.transformer
    const { latents, ids } = await encodeReferences(references, { vae: this.vae, collectives, signal })
    return { ...prompts, references: { latents: latents.cast(dtype), ids } }
  }

  /** Frees the three models; idempotent. */
  async dispose(): Promise<void> {
    await this.transformer.dispose()
    await this.textEncoder.dispose()
    await this.vae.dispose()
  }

  /** `dispose`, for `await using`. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.dispose()
  }
}

import { RankwiseError, Tensor, Turns, throwIfAborted } from '@rankwise/core'
import {
  type AutoencoderKLFlux2,
  type Callable,
  callable,
  computeEmpiricalMu,
  denormalizeLatents,
  FlowMatchEulerDiscreteScheduler,
  modelTimestep,
  prepareLatentIds,
  type Qwen3ForCausalLM,
  type Tokenizer,
  unpackLatents,
  unpatchifyLatents,
} from '@rankwise/diffusion'
import { type Flux2KleinComponents, type Flux2KleinFromPretrainedOptions, loadComponents } from './components.ts'
import { type Conditions, encodeConditions } from './conditions.ts'
import {
  type DenoisingStep,
  type Flux2KleinOptions,
  type OutputType,
  type ResolvedOptions,
  resolveOptions,
} from './generation-options.ts'
import { guide } from './guidance.ts'
import { latentNoise } from './latent-noise.ts'
import { type Flux2Output, float32, toOutput } from './output.ts'
import type { Prompt } from './prompt.ts'
import { requireSameRequest } from './same-request.ts'
import type { Flux2Transformer2DModel } from './transformer.ts'

/** VAE latents per token, in each direction. */
const PATCH = 2

/** Side of the default picture, in VAE latents. */
const DEFAULT_SAMPLE_SIZE = 128

/** Calls that overlap on one rank need not overlap in the same way on another. */
const turns = new Turns()

/**
 * Text-to-image with FLUX.2-klein. Every rank calls it with the same options and gets the same picture.
 *
 *     const pipeline = await Flux2KleinPipeline.fromPretrained(dir, { backend })
 *     const { images } = await pipeline({ prompt: 'a cat on a blue background' })
 */
export class Flux2KleinPipeline implements Flux2KleinComponents, AsyncDisposable {
  readonly transformer: Flux2Transformer2DModel
  readonly textEncoder: Qwen3ForCausalLM
  readonly vae: AutoencoderKLFlux2
  readonly tokenizer: Tokenizer
  readonly scheduler: FlowMatchEulerDiscreteScheduler
  readonly isDistilled: boolean

  constructor(components: Flux2KleinComponents) {
    this.transformer = components.transformer
    this.textEncoder = components.textEncoder
    this.vae = components.vae
    this.tokenizer = components.tokenizer
    this.scheduler = components.scheduler
    this.isDistilled = components.isDistilled
  }

  /**
   * Loads what is not given from a pipeline as diffusers writes it: a folder, or its id on a hub, `org/name`. With a
   * `parallelConfig`, the ranks load together or not at all. The result is called like a function.
   *
   * @throws RankwiseError `CONFIG_NOT_FOUND`, `CONFIG_INVALID`, `OPTION_CONFLICT`, and those of the components
   */
  static async fromPretrained(
    pathOrId: string,
    options: Flux2KleinFromPretrainedOptions,
  ): Promise<Callable<Flux2KleinPipeline>> {
    if (options.transformer !== undefined && options.parallelConfig !== undefined) {
      throw new RankwiseError('OPTION_CONFLICT', 'a transformer that is already loaded cannot be split here', {
        where: 'parallelConfig',
        remedy: 'pass parallelConfig to Flux2Transformer2DModel.fromPretrained',
      })
    }
    return callable(new Flux2KleinPipeline(await loadComponents(pathOrId, options)))
  }

  /**
   * Draws pictures.
   *
   * @throws RankwiseError `OPTION_UNKNOWN`, `OPTION_INVALID`, `PROMPT_MISSING`, `OPTIONS_DIFFER`, `LATENTS_SHAPE`,
   *   `ABORTED`, and those of the models, the backend and the collectives
   */
  async generate<T extends OutputType = 'image'>(options: Flux2KleinOptions<T>): Promise<Flux2Output<T>> {
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
    options: Flux2KleinOptions<T>,
  ): AsyncGenerator<DenoisingStep, Flux2Output<T>, void> {
    const pixelsPerToken = this.vae.vaeScaleFactor * PATCH
    const defaultSize = DEFAULT_SAMPLE_SIZE * this.vae.vaeScaleFactor
    const resolved = resolveOptions(options, { pixelsPerToken, defaultSize })
    const { signal } = options
    using _turn = await turns.take(this.transformer.collectives)
    throwIfAborted(signal)
    const [rows, columns] = [resolved.height / pixelsPerToken, resolved.width / pixelsPerToken]
    const conditions = await encodeConditions(this, options, resolved)
    const { collectives } = this.transformer
    await requireSameRequest(resolved, conditions, collectives, signal)
    const latents = yield* this.denoise(options, resolved, conditions, [rows, columns])
    throwIfAborted(signal)
    const statistics = await this.vae.latentStatistics()
    const decodable = unpatchifyLatents(denormalizeLatents(unpackLatents(latents, rows, columns), statistics))
    return toOutput(decodable, this.vae, resolved.outputType as T, signal)
  }

  /**
   * From noise to latents, `[batch, rows * columns, channels]`. When a rank fails here, be it in its callback, the others
   * fail as well instead of waiting for it.
   */
  private async *denoise(
    { generator, latents: given, signal, callbackOnStepEnd }: Flux2KleinOptions,
    resolved: ResolvedOptions,
    conditions: Conditions,
    [rows, columns]: readonly [rows: number, columns: number],
  ): AsyncGenerator<DenoisingStep, Tensor<'float32'>, void> {
    const { collectives, config } = this.transformer
    const scheduler = scheduleFor(this.scheduler, rows * columns, resolved)
    const imageIds = prepareLatentIds(rows, columns)
    const shape = [conditions.prompt.embeds.shape[0] as number, config.inChannels, rows, columns]
    let latents = await latentNoise(shape, { generator, latents: given, collectives, signal })
    const totalSteps = scheduler.timesteps.length
    try {
      for (const [step, timestep] of scheduler.timesteps.entries()) {
        throwIfAborted(signal)
        const velocity = await predictVelocity(this.transformer, { latents, timestep, imageIds, signal }, conditions)
        latents = scheduler.step(velocity, timestep, latents)
        const replacement = await callbackOnStepEnd?.({ step, totalSteps, timestep, latents })
        if (replacement !== undefined) {
          latents = replacement.clone()
          await collectives?.broadcast(latents, { source: 0, signal })
        }
        yield { step, totalSteps, timestep, latents }
      }
      return latents
    } catch (error) {
      collectives?.abort(error as Error)
      throw error
    }
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

/** A schedule of its own, so that calls that overlap do not share a position in it. */
function scheduleFor(
  { config }: FlowMatchEulerDiscreteScheduler,
  imageTokens: number,
  { numInferenceSteps, sigmas }: ResolvedOptions,
): FlowMatchEulerDiscreteScheduler {
  const scheduler = new FlowMatchEulerDiscreteScheduler(config)
  scheduler.setTimesteps({ numInferenceSteps, sigmas, mu: computeEmpiricalMu(imageTokens, numInferenceSteps) })
  scheduler.setBeginIndex(0)
  return scheduler
}

interface PredictionState {
  readonly latents: Tensor<'float32'>
  readonly timestep: number
  readonly imageIds: Tensor<'int32'>
  readonly signal: AbortSignal | undefined
}

/** The velocity at the current latents, with guidance where there is a negative condition. */
async function predictVelocity(
  transformer: Flux2Transformer2DModel,
  { latents, timestep, imageIds, signal }: PredictionState,
  { prompt, negative, guidanceScale }: Conditions,
): Promise<Tensor<'float32'>> {
  const batch = latents.shape[0] as number
  const time = Tensor.float32([batch], new Float32Array(batch).fill(modelTimestep(timestep, 'float32')))
  const predict = async ({ embeds, ids }: Prompt) =>
    float32(
      await transformer.run(
        { hiddenStates: latents, encoderHiddenStates: embeds, timestep: time, imgIds: imageIds, txtIds: ids },
        { signal },
      ),
    )
  const velocity = await predict(prompt)
  return negative === undefined ? velocity : guide(velocity, await predict(negative), guidanceScale)
}

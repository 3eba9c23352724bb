import { Tensor } from '@rankwise/core'
import { float32 } from './output.ts'
import type { Prompt } from './prompt.ts'
import type { Flux2ReferenceCache } from './reference-cache.ts'
import { firstTokens, joinIds, joinTokens, type ReferenceTokens } from './reference-tokens.ts'
import type { Flux2Transformer2DModel } from './transformer.ts'

/** Where a denoising is. */
export interface DenoisingState {
  /** Packed latents, float32 `[batch, tokens, channels]`. */
  readonly latents: Tensor<'float32'>
  /** int32 `[tokens, 4]` */
  readonly ids: Tensor<'int32'>
  /** Noise level in [0, 1], float32 `[batch]`. */
  readonly timestep: Tensor<'float32'>
  readonly signal: AbortSignal | undefined
}

/** Predicts where the latents of a denoising go; disposing of it frees what it keeps between the steps. */
export interface Velocity extends Disposable {
  /** Of the picture's tokens, float32 `[batch, tokens, channels]`. */
  predict(state: DenoisingState): Promise<Tensor<'float32'>>
}

/** What a velocity is predicted from beside the latents. */
export interface VelocityConditions {
  readonly prompt: Prompt
  readonly references: ReferenceTokens | undefined
  /** Guidance scale, for models that embed it. */
  readonly guidanceScale?: number
}

/** One forward over the tokens of the picture and, behind them, those of the references. */
export async function predictVelocity(
  transformer: Flux2Transformer2DModel,
  { latents, ids, timestep, signal }: DenoisingState,
  { prompt, references, guidanceScale }: VelocityConditions,
): Promise<Tensor<'float32'>> {
  const [batch = 0, tokens = 0] = latents.shape
  const inputs = {
    hiddenStates: references === undefined ? latents : joinTokens([latents, references.latents], batch),
    imgIds: references === undefined ? ids : joinIds([ids, references.ids]),
    encoderHiddenStates: prompt.embeds,
    txtIds: prompt.ids,
    timestep,
    ...(guidanceScale === undefined ? {} : { guidance: filled(batch, guidanceScale) }),
  }
  const velocity = float32(await transformer.run(inputs, { signal }))
  return references === undefined ? velocity : firstTokens(velocity, tokens)
}

/** float32 `[size]` of one value. */
export function filled(size: number, value: number): Tensor<'float32'> {
  return Tensor.float32([size], new Float32Array(size).fill(value))
}

/** Reads the references in the first step, and later what that left of them. */
export class CachedVelocity implements Velocity {
  readonly #transformer: Flux2Transformer2DModel
  readonly #prompt: Prompt
  readonly #references: ReferenceTokens
  #cache: Flux2ReferenceCache | undefined

  constructor(transformer: Flux2Transformer2DModel, prompt: Prompt, references: ReferenceTokens) {
    this.#transformer = transformer
    this.#prompt = prompt
    this.#references = references
  }

  async predict({ latents, ids, timestep, signal }: DenoisingState): Promise<Tensor<'float32'>> {
    const { embeds, ids: txtIds } = this.#prompt
    const common = { encoderHiddenStates: embeds, txtIds, timestep }
    if (this.#cache !== undefined) {
      const inputs = { ...common, hiddenStates: latents, imgIds: ids }
      return float32(await this.#transformer.runCached(inputs, this.#cache, { signal }))
    }
    const inputs = {
      ...common,
      hiddenStates: joinTokens([this.#references.latents, latents], latents.shape[0] as number),
      imgIds: joinIds([this.#references.ids, ids]),
      referenceTokens: this.#references.ids.shape[0] as number,
    }
    const { sample, cache } = await this.#transformer.extractReferences(inputs, { signal })
    this.#cache = cache
    return float32(sample)
  }

  [Symbol.dispose](): void {
    this.#cache?.dispose()
  }
}

import { Tensor } from '@rankwise/core'
import { type LatentTensor, latentDTypeOf, latentTensor } from './latent-tensor.ts'
import type { Prompt } from './prompt.ts'
import type { Flux2ReferenceCache } from './reference-cache.ts'
import { firstTokens, joinIds, joinTokens, type ReferenceTokens } from './reference-tokens.ts'
import type { Flux2Transformer2DModel } from './transformer.ts'

/** Where a denoising is. */
export interface DenoisingState {
  /** Packed latents, `[batch, tokens, channels]`. */
  readonly latents: LatentTensor
  /** int32 `[tokens, 4]` */
  readonly ids: Tensor<'int32'>
  /** Noise level in [0, 1], float32 `[batch]`, with the values that the dtype of the latents has. */
  readonly timestep: Tensor<'float32'>
  readonly signal: AbortSignal | undefined
}

/** Predicts where the latents of a denoising go; disposing of it frees what it keeps between the steps. */
export interface Velocity extends Disposable {
  /** Of the picture's tokens, `[batch, tokens, channels]` in the dtype of the transformer. */
  predict(state: DenoisingState): Promise<LatentTensor>
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
): Promise<LatentTensor> {
  const [batch = 0, tokens = 0] = latents.shape
  const inputs = {
    hiddenStates:
      references === undefined
        ? latents
        : joinTokens([latents, references.latents], batch, latentDTypeOf(transformer, 'transformer')),
    imgIds: references === undefined ? ids : joinIds([ids, references.ids]),
    encoderHiddenStates: prompt.embeds,
    txtIds: prompt.ids,
    timestep,
    ...(guidanceScale === undefined ? {} : { guidance: filled(batch, guidanceScale) }),
  }
  const velocity = latentTensor(await transformer.run(inputs, { signal }), 'transformer')
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

  async predict({ latents, ids, timestep, signal }: DenoisingState): Promise<LatentTensor> {
    const { embeds, ids: txtIds } = this.#prompt
    const common = { encoderHiddenStates: embeds, txtIds, timestep }
    if (this.#cache !== undefined) {
      const inputs = { ...common, hiddenStates: latents, imgIds: ids }
      return latentTensor(await this.#transformer.runCached(inputs, this.#cache, { signal }), 'transformer')
    }
    const inputs = {
      ...common,
      hiddenStates: joinTokens(
        [this.#references.latents, latents],
        latents.shape[0] as number,
        latentDTypeOf(this.#transformer, 'transformer'),
      ),
      imgIds: joinIds([this.#references.ids, ids]),
      referenceTokens: this.#references.ids.shape[0] as number,
    }
    const { sample, cache } = await this.#transformer.extractReferences(inputs, { signal })
    this.#cache = cache
    return latentTensor(sample, 'transformer')
  }

  [Symbol.dispose](): void {
    this.#cache?.dispose()
  }
}

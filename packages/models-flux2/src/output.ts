import type { Collectives, Tensor } from '@rankwise/core'
import {
  type AutoencoderKLFlux2,
  denormalizeLatents,
  type Image,
  postprocess,
  unpackLatents,
  unpatchifyLatents,
} from '@rankwise/diffusion'
import type { OutputType } from './generation-options.ts'
import { type LatentTensor, latentTensor } from './latent-tensor.ts'

/** What a FLUX.2 pipeline draws. */
export interface Flux2Output<T extends OutputType = 'image'> {
  /**
   * Pictures, at least one. For `outputType: 'array'` a float32 tensor `[batch, height, width, 3]` in [0, 1]. For
   * `'latent'` what diffusers' pipeline of the same name returns: `Flux2Pipeline` gives packed, normalised latents
   * `[batch, tokens, 4 * latentChannels]`; the others give them as the VAE takes them, `[batch, latentChannels, height /
   * vaeScaleFactor, width / vaeScaleFactor]`; both in the dtype of the transformer.
   */
  readonly images: T extends 'image' ? [Image, ...Image[]] : T extends 'latent' ? LatentTensor : Tensor<'float32'>
}

/** Latents as `outputType: 'latent'` returns them: as they were denoised, or as the VAE takes them. */
export type LatentOutput = 'packed' | 'decodable'

/** How latents become an output. */
export interface OutputOptions<T extends OutputType> {
  readonly outputType: T
  readonly latentOutput: LatentOutput
  /** Tokens of the picture in each direction. */
  readonly rows: number
  readonly columns: number
  readonly vae: AutoencoderKLFlux2
  /** The ranks that share the tiles of a VAE with tiling. */
  readonly collectives: Collectives | undefined
  readonly signal: AbortSignal | undefined
}

/**
 * Decodes latents into the form that was asked for.
 *
 * @param latents - packed and normalised, `[batch, rows * columns, 4 * latentChannels]`
 */
export async function toOutput<T extends OutputType>(
  latents: LatentTensor,
  options: OutputOptions<T>,
): Promise<Flux2Output<T>> {
  return { images: (await render(latents, options)) as Flux2Output<T>['images'] }
}

async function render(
  latents: LatentTensor,
  { outputType, latentOutput, rows, columns, vae, collectives, signal }: OutputOptions<OutputType>,
): Promise<Image[] | LatentTensor> {
  if (outputType === 'latent' && latentOutput === 'packed') return latents
  const statistics = await vae.latentStatistics(latents.dtype)
  const decodable = unpatchifyLatents(denormalizeLatents(unpackLatents(latents, rows, columns), statistics))
  if (outputType === 'latent') return decodable
  const decoded = latentTensor(await vae.decode(decodable, { collectives, signal }), 'vae')
  return outputType === 'array' ? postprocess(decoded, 'array') : postprocess(decoded, 'image')
}

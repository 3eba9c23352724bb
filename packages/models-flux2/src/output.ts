import { RankwiseError, type Tensor } from '@rankwise/core'
import { type AutoencoderKLFlux2, type Image, postprocess } from '@rankwise/diffusion'
import type { OutputType } from './generation-options.ts'

/** What a FLUX.2 pipeline draws. */
export interface Flux2Output<T extends OutputType = 'image'> {
  /**
   * Pictures, at least one. For `outputType: 'array'` a float32 tensor `[batch, height, width, 3]` in [0, 1], for
   * `'latent'` one `[batch, latentChannels, height / vaeScaleFactor, width / vaeScaleFactor]`.
   */
  readonly images: T extends 'image' ? [Image, ...Image[]] : Tensor<'float32'>
}

/**
 * Decodes latents into the form that was asked for.
 *
 * @param latents - float32 `[batch, latentChannels, h, w]`, as the VAE takes them
 */
export async function toOutput<T extends OutputType>(
  latents: Tensor<'float32'>,
  vae: AutoencoderKLFlux2,
  outputType: T,
  signal: AbortSignal | undefined,
): Promise<Flux2Output<T>> {
  return { images: (await render(latents, vae, outputType, signal)) as Flux2Output<T>['images'] }
}

async function render(
  latents: Tensor<'float32'>,
  vae: AutoencoderKLFlux2,
  outputType: OutputType,
  signal: AbortSignal | undefined,
): Promise<Image[] | Tensor<'float32'>> {
  if (outputType === 'latent') return latents
  const decoded = float32(await vae.decode(latents, { signal }))
  return outputType === 'array' ? postprocess(decoded, 'array') : postprocess(decoded, 'image')
}

/** @throws RankwiseError `DTYPE_UNSUPPORTED` */
export function float32(tensor: Tensor): Tensor<'float32'> {
  if (tensor.dtype === 'float32') return tensor as Tensor<'float32'>
  throw new RankwiseError('DTYPE_UNSUPPORTED', `expected float32, got ${tensor.dtype}`, {
    rule: 'the models of a FLUX.2 pipeline compute in float32',
  })
}

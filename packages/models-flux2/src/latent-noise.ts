import { type Collectives, RankwiseError, type Shape, sameShape, type Tensor } from '@rankwise/core'
import { Generator, type LatentDType, packLatents, randnTensor } from '@rankwise/diffusion'
import { type LatentTensor, latentTensor } from './latent-tensor.ts'

export interface LatentNoiseOptions {
  readonly generator: Generator | readonly Generator[] | undefined
  /** Instead of drawn noise; in any dtype. */
  readonly latents: Tensor | undefined
  /** In which the noise is drawn, or to which latents are cast. */
  readonly dtype: LatentDType
  /** The ranks that have to start from the same noise. */
  readonly collectives: Collectives | undefined
  readonly signal: AbortSignal | undefined
}

/**
 * The latents a denoising starts from, packed to `[batch, height * width, channels]`. Every rank gets those of rank 0:
 * ranks that draw their own would otherwise denoise different pictures into each other.
 *
 * @param shape - `[batch, channels, height, width]`
 * @throws RankwiseError those of the collectives
 */
export async function latentNoise(
  shape: Shape,
  { generator, latents, dtype, collectives, signal }: LatentNoiseOptions,
): Promise<LatentTensor> {
  const noise: LatentTensor =
    latents === undefined
      ? randnTensor(shape, generator ?? randomGenerator(), { dtype })
      : // A copy, because the broadcast writes into it.
        latentTensor(latents, 'latents').clone().cast(dtype)
  await collectives?.broadcast(noise, { source: 0, signal })
  return packLatents(noise)
}

/** @throws RankwiseError `LATENTS_SHAPE` */
export function requireLatents(latents: Tensor | undefined, shape: Shape): void {
  if (latents === undefined || sameShape(latents.shape, shape)) return
  throw new RankwiseError('LATENTS_SHAPE', 'the latents do not fit the picture', {
    where: 'latents',
    actual: { given: latents.shape, expected: shape },
    rule: 'latents are [batch, channels, height, width] of the patched latents',
  })
}

function randomGenerator(): Generator {
  const generator = new Generator()
  generator.seed()
  return generator
}

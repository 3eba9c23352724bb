import { type Collectives, RankwiseError, type Shape, sameShape, type Tensor } from '@rankwise/core'
import { Generator, packLatents, randnTensor } from '@rankwise/diffusion'
import { float32 } from './output.ts'

export interface LatentNoiseOptions {
  readonly generator: Generator | readonly Generator[] | undefined
  /** Instead of drawn noise. */
  readonly latents: Tensor | undefined
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
  { generator, latents, collectives, signal }: LatentNoiseOptions,
): Promise<Tensor<'float32'>> {
  // A copy, because the broadcast writes into it.
  const noise = latents === undefined ? randnTensor(shape, generator ?? randomGenerator()) : float32(latents).clone()
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

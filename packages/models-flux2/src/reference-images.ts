import { RankwiseError, Tensor, throwIfAborted } from '@rankwise/core'
import {
  type AutoencoderKLFlux2,
  type AutoencoderRunOptions,
  type ImageInput,
  loadImage,
  normalizeLatents,
  packLatents,
  patchifyLatents,
  prepareLatentIds,
} from '@rankwise/diffusion'
import { preprocessReference } from './image-processor.ts'
import { type LatentTensor, latentTensor } from './latent-tensor.ts'
import { joinTokens } from './reference-tokens.ts'

/** VAE latents per token, in each direction. */
const PATCH = 2

/** Distance of the references from the picture, which is at 0, and from each other, along the T axis of the ids. */
const REFERENCE_DISTANCE = 10

/** Reference images as the transformer takes them, one behind the other. */
export interface ReferenceImages {
  /** Normalised and packed: `[1, tokens, 4 * latentChannels]`, in the dtype of the VAE. */
  readonly latents: LatentTensor
  /** Positions (T, H, W, L), (10 + 10 i, h, w, 0) for reference i: `[tokens, 4]`. */
  readonly ids: Tensor<'int32'>
  /** Pixels of the first reference after scaling and cutting: the default size of the picture. */
  readonly width: number
  readonly height: number
}

/** Reference images that are read, scaled and cut. */
export interface ReferenceSamples {
  /** One an image, `[1, 3, height, width]` in [-1, 1]. */
  readonly samples: readonly Tensor<'float32'>[]
  /** Pixels of the first: the default size of the picture. */
  readonly width: number
  readonly height: number
}

/** Options of `encodeReferenceImages`. */
export interface EncodeReferenceOptions extends Pick<AutoencoderRunOptions, 'collectives' | 'signal'> {
  readonly vae: AutoencoderKLFlux2
}

/**
 * Reads, scales and encodes reference images, as diffusers' FLUX.2 pipelines do. Nothing is drawn: the mode of what the
 * VAE gives is taken. All images are read and checked before the first is encoded. Where the VAE cuts large pictures into
 * tiles, ranks that give their `collectives` share them.
 *
 * @param input - one image or several: an `Image`, the path of a PNG or JPEG, or the bytes of one
 * @throws RankwiseError `REFERENCE_MISSING` for an empty list, `REFERENCE_TOO_SMALL`, `REFERENCE_ASPECT_RATIO`,
 *   `IMAGE_INPUT`, `IMAGE_READ`, `IMAGE_FORMAT`, `IMAGE_TOO_LARGE`, `ABORTED`, and those of the VAE
 */
export async function encodeReferenceImages(
  input: ImageInput | readonly ImageInput[],
  options: EncodeReferenceOptions,
): Promise<ReferenceImages> {
  return encodeReferences(await readReferences(input, options), options)
}

/** The part of `encodeReferenceImages` before the VAE. @throws RankwiseError as `encodeReferenceImages` */
export async function readReferences(
  input: ImageInput | readonly ImageInput[],
  { vae, signal }: EncodeReferenceOptions,
): Promise<ReferenceSamples> {
  const inputs = isList(input) ? input : [input]
  if (inputs.length === 0) {
    throw new RankwiseError('REFERENCE_MISSING', 'there is no reference image', {
      where: 'image',
      rule: 'image is one image or a list of at least one',
    })
  }
  const pixelsPerToken = vae.vaeScaleFactor * PATCH
  const samples: Tensor<'float32'>[] = []
  for (const [i, input] of inputs.entries()) {
    throwIfAborted(signal)
    const name = typeof input === 'string' ? input : `image[${i}]`
    samples.push(preprocessReference(await loadImage(input, name), pixelsPerToken, name))
  }
  const [, , height, width] = (samples[0] as Tensor).shape as [number, number, number, number]
  return { samples, width, height }
}

/** The part of `encodeReferenceImages` that the VAE does. @throws RankwiseError `ABORTED`, and those of the VAE */
export async function encodeReferences(
  { samples, width, height }: ReferenceSamples,
  options: EncodeReferenceOptions,
): Promise<ReferenceImages> {
  const tokens: LatentTensor[] = []
  for (const sample of samples) tokens.push(await encodeReference(sample, options))
  const latents = joinTokens(tokens, 1, (tokens[0] as LatentTensor).dtype)
  return { latents, ids: referenceIds(samples, options.vae.vaeScaleFactor * PATCH), width, height }
}

/** Not by `Array.isArray`, which does not narrow a readonly list away; bytes are no list. */
function isList(input: ImageInput | readonly ImageInput[]): input is readonly ImageInput[] {
  return Array.isArray(input)
}

/** @returns `[1, tokens, 4 * latentChannels]` */
async function encodeReference(
  sample: Tensor<'float32'>,
  { vae, ...options }: EncodeReferenceOptions,
): Promise<LatentTensor> {
  const mode = latentTensor(await vae.encode(sample, options), 'vae')
  const latents = normalizeLatents(patchifyLatents(mode), await vae.latentStatistics(mode.dtype))
  return packLatents(latents)
}

function referenceIds(samples: readonly Tensor[], pixelsPerToken: number): Tensor<'int32'> {
  const ids = samples.map(({ shape: [, , height, width] }, i) => {
    const ids = prepareLatentIds((height as number) / pixelsPerToken, (width as number) / pixelsPerToken)
    return ids.data.map((value, j) => (j % 4 === 0 ? REFERENCE_DISTANCE * (i + 1) : value))
  })
  const data = Int32Array.from(ids.flatMap((part) => [...part]))
  return Tensor.int32([data.length / 4, 4], data)
}

import { RankwiseError, type Tensor } from '@rankwise/core'
import { type Image, preprocess } from '@rankwise/diffusion'

/** Limits of diffusers' `Flux2ImageProcessor`. */
const MIN_SIDE = 64
const MAX_ASPECT_RATIO = 8
const MAX_AREA = 1024 * 1024

/**
 * A reference image as the VAE of FLUX.2 encodes it: scaled down to an area of 1024 x 1024 where it is larger, and cut
 * at its edges to whole tokens.
 *
 * @param pixelsPerToken - side of a token in pixels, 16 for FLUX.2
 * @param where - the image, for errors
 * @returns `[1, 3, height, width]` in [-1, 1], both sides multiples of `pixelsPerToken`
 * @throws RankwiseError `REFERENCE_TOO_SMALL` below 64 pixels a side, `REFERENCE_ASPECT_RATIO` above 8 to 1
 */
export function preprocessReference(image: Image, pixelsPerToken: number, where: string): Tensor<'float32'> {
  requireUsable(image, Math.max(MIN_SIDE, pixelsPerToken), where)
  const [width, height] = limitedSize(image.width, image.height)
  const limited = width === image.width && height === image.height ? image : image.resize(width, height)
  const wholeTokens = (pixels: number) => Math.floor(pixels / pixelsPerToken) * pixelsPerToken
  return preprocess(limited.centerCrop(wholeTokens(width), wholeTokens(height)))
}

/** The size of a picture of at most `area` pixels: itself where it has no more, otherwise scaled and rounded down. */
export function limitedSize(width: number, height: number, area = MAX_AREA): readonly [width: number, height: number] {
  if (width * height <= area) return [width, height]
  const scale = Math.sqrt(area / (width * height))
  return [Math.floor(width * scale), Math.floor(height * scale)]
}

function requireUsable({ width, height }: Image, minSide: number, where: string): void {
  if (width < minSide || height < minSide) {
    throw new RankwiseError('REFERENCE_TOO_SMALL', 'the reference image is too small', {
      where,
      actual: { width, height },
      rule: `both sides have at least ${minSide} pixels`,
    })
  }
  const ratio = Math.max(width / height, height / width)
  if (ratio <= MAX_ASPECT_RATIO) return
  throw new RankwiseError('REFERENCE_ASPECT_RATIO', 'the reference image is too long', {
    where,
    actual: { width, height, ratio: Number(ratio.toFixed(2)) },
    rule: `the longer side is at most ${MAX_ASPECT_RATIO} times the shorter`,
    remedy: 'cut it to the part that matters',
  })
}

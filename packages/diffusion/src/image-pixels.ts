import { RankwiseError } from '@rankwise/core'

export const CHANNELS = 3

/** What files are decoded to and images are made of. */
export interface Pixels {
  readonly width: number
  readonly height: number
  /** `[height, width, 3]`, row-major, RGB of 8 bits a channel. */
  readonly data: Uint8Array
}

/** Twice Pillow's `MAX_IMAGE_PIXELS`: from there on it takes a file for a decompression bomb. */
const MAX_PIXELS = 178_956_970

/**
 * Refuses sizes that a file's header claims, before memory for them is taken.
 *
 * @throws RankwiseError `IMAGE_TOO_LARGE`, `IMAGE_FORMAT` for a side of zero
 */
export function requireDecodable(width: number, height: number, where: string | undefined): void {
  if (width === 0 || height === 0) throw imageFormat('the image has no pixels', where, { actual: { width, height } })
  if (width * height <= MAX_PIXELS) return
  throw new RankwiseError('IMAGE_TOO_LARGE', 'the image is too large to be decoded', {
    ...(where === undefined ? {} : { where }),
    actual: { width, height, pixels: width * height },
    rule: `width * height is at most ${MAX_PIXELS}`,
    remedy: 'make it smaller: references above 1024 x 1024 are scaled down anyway',
  })
}

/** An error about a file that is not what is decoded here. */
export function imageFormat(
  what: string,
  where: string | undefined,
  details: Pick<ConstructorParameters<typeof RankwiseError>[2] & object, 'actual' | 'rule' | 'remedy' | 'cause'> = {},
): RankwiseError {
  return new RankwiseError('IMAGE_FORMAT', what, { ...(where === undefined ? {} : { where }), ...details })
}

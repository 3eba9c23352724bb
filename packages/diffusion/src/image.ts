import { randomUUID } from 'node:crypto'
import { rename, rm, writeFile } from 'node:fs/promises'
import { basename, dirname, extname, join } from 'node:path'
import { RankwiseError, Tensor } from '@rankwise/core'
import { convertIndexedToRgb, type DecodedPng, decode, encode } from 'fast-png'
import { type LatentDType, roundingOf } from './rounding.ts'

const CHANNELS = 3

/** An RGB image of 8 bits a channel. */
export class Image {
  readonly width: number
  readonly height: number
  /** `[height, width, 3]`, row-major. */
  readonly data: Uint8Array

  /** @throws RankwiseError `IMAGE_SIZE` when `data` does not hold `height * width * 3` bytes */
  constructor(width: number, height: number, data: Uint8Array) {
    const positive = [width, height].every((size) => Number.isSafeInteger(size) && size > 0)
    if (!positive || data.length !== width * height * CHANNELS) {
      throw new RankwiseError('IMAGE_SIZE', 'data does not fit the size of the image', {
        actual: { width, height, bytes: data.length },
        rule: 'width and height are positive and data holds height * width * 3 bytes',
      })
    }
    this.width = width
    this.height = height
    this.data = data
  }

  /**
   * Decodes a PNG of 8 bits a channel: RGB, greyscale or palette. An alpha channel is dropped, as Pillow's
   * `convert('RGB')` does.
   *
   * @throws RankwiseError `IMAGE_FORMAT` when the bytes are no PNG or have another depth
   */
  static fromPng(bytes: Uint8Array): Image {
    const png = decodePng(bytes)
    return new Image(png.width, png.height, rgbOf(png))
  }

  /** The image as a PNG file. */
  toPng(): Uint8Array {
    return encode({ width: this.width, height: this.height, data: this.data, channels: CHANNELS, depth: 8 })
  }

  /**
   * Writes a PNG. The file appears complete or not at all: it is written beside its place and renamed.
   *
   * @param path ends in `.png`
   * @throws RankwiseError `IMAGE_FORMAT` for another ending, `IMAGE_WRITE` when the file cannot be written; nothing is
   *   left behind
   */
  async save(path: string): Promise<void> {
    if (extname(path).toLowerCase() !== '.png') {
      throw new RankwiseError('IMAGE_FORMAT', 'images are saved as PNG only', {
        where: path,
        rule: 'the path ends in .png',
      })
    }
    const temporary = join(dirname(path), `.${basename(path)}.${randomUUID()}.tmp`)
    try {
      await writeFile(temporary, this.toPng(), { flag: 'wx' })
      await rename(temporary, path)
    } catch (cause) {
      await rm(temporary, { force: true })
      throw new RankwiseError('IMAGE_WRITE', 'the image cannot be written', { where: path, cause })
    }
  }
}

/**
 * Turns what a VAE decodes into images, as diffusers' `VaeImageProcessor.postprocess` does: `(x / 2 + 0.5)` limited to
 * [0, 1] in the tensor's dtype; for images then `round(255 * x)`, ties to even as numpy has them.
 *
 * @param image `[batch, 3, height, width]` in [-1, 1]
 * @param outputType `'image'` for one `Image` per batch entry, `'array'` for float32 `[batch, height, width, 3]` in
 *   [0, 1]. @default 'image'
 * @throws RankwiseError `IMAGE_SHAPE`, `IMAGE_NAN`, `DTYPE_UNSUPPORTED`
 */
export function postprocess(image: Tensor<LatentDType>, outputType?: 'image'): Image[]
export function postprocess(image: Tensor<LatentDType>, outputType: 'array'): Tensor<'float32'>
export function postprocess(
  image: Tensor<LatentDType>,
  outputType: 'image' | 'array' = 'image',
): Image[] | Tensor<'float32'> {
  const array = toChannelsLast(image)
  return outputType === 'array' ? array : toImages(array)
}

function toChannelsLast(image: Tensor<LatentDType>): Tensor<'float32'> {
  const [batch = 0, channels, height = 0, width = 0] = image.shape
  if (image.shape.length !== 4 || channels !== CHANNELS) {
    throw new RankwiseError('IMAGE_SHAPE', 'not a batch of RGB images', {
      actual: { shape: image.shape },
      rule: 'the shape is [batch, 3, height, width]',
    })
  }
  const round = roundingOf(image.dtype)
  const source = image.cast('float32').data
  const result = Tensor.zeros('float32', [batch, height, width, CHANNELS])
  const pixels = height * width
  for (let plane = 0; plane < batch * CHANNELS; plane++) {
    const first = Math.floor(plane / CHANNELS) * pixels * CHANNELS + (plane % CHANNELS)
    for (let pixel = 0; pixel < pixels; pixel++) {
      const index = plane * pixels + pixel
      result.data[first + pixel * CHANNELS] = toUnit(source[index] as number, round, index)
    }
  }
  return result
}

function toUnit(value: number, round: (value: number) => number, index: number): number {
  if (Number.isNaN(value)) {
    throw new RankwiseError('IMAGE_NAN', 'the decoded image holds a NaN', {
      actual: { index },
      rule: 'every value is a number',
      remedy: 'decode in float32: in float16 the VAE can overflow',
    })
  }
  return Math.min(Math.max(round(round(value * 0.5) + 0.5), 0), 1)
}

function toImages({ shape, data }: Tensor<'float32'>): Image[] {
  const [batch = 0, height = 0, width = 0] = shape
  const size = height * width * CHANNELS
  return Array.from({ length: batch }, (_, i) => {
    const values = data.subarray(i * size, (i + 1) * size)
    const bytes = new Uint8Array(size)
    // A loop: `Uint8Array.from` with a function iterates, 2.1 s against 35 ms for the values of a 1024x1024 image.
    for (let j = 0; j < size; j++) bytes[j] = roundHalfToEven(Math.fround((values[j] as number) * 255))
    return new Image(width, height, bytes)
  })
}

function roundHalfToEven(value: number): number {
  const below = Math.floor(value)
  if (value - below !== 0.5) return Math.round(value)
  return below % 2 === 0 ? below : below + 1
}

function decodePng(bytes: Uint8Array): DecodedPng {
  try {
    return decode(bytes, { checkCrc: true })
  } catch (cause) {
    throw new RankwiseError('IMAGE_FORMAT', 'the bytes are no PNG', { actual: { bytes: bytes.length }, cause })
  }
}

function rgbOf(png: DecodedPng): Uint8Array {
  if (png.palette !== undefined) return dropAlpha(convertIndexedToRgb(png), (png.palette[0] as number[]).length)
  if (png.depth !== 8 || !(png.data instanceof Uint8Array)) {
    throw new RankwiseError('IMAGE_FORMAT', 'the PNG has another depth', {
      actual: { bitsPerChannel: png.depth },
      rule: '8 bits a channel',
    })
  }
  return dropAlpha(png.data, png.channels)
}

/** Samples of `channels` a pixel (1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha) as RGB. */
function dropAlpha(samples: Uint8Array, channels: number): Uint8Array {
  if (channels === CHANNELS) return samples
  const grey = channels < CHANNELS
  const rgb = new Uint8Array((samples.length / channels) * CHANNELS)
  for (let i = 0; i < rgb.length; i++) {
    const pixel = Math.floor(i / CHANNELS) * channels
    rgb[i] = samples[grey ? pixel : pixel + (i % CHANNELS)] as number
  }
  return rgb
}

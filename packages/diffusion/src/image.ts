import { randomUUID } from 'node:crypto'
import { readFile, rename, rm, stat, writeFile } from 'node:fs/promises'
import { basename, dirname, extname, join } from 'node:path'
import { RankwiseError } from '@rankwise/core'
import { decodeJpeg, isJpeg } from './image-jpeg.ts'
import { CHANNELS, imageFormat, type Pixels } from './image-pixels.ts'
import { decodePng, encodePng, isPng } from './image-png.ts'
import { resizeLanczos } from './image-resize.ts'

/** An image, or where it comes from: the path of a PNG or JPEG, or the bytes of one. */
export type ImageInput = Image | string | Uint8Array

/** An RGB image of 8 bits a channel. */
export class Image {
  readonly width: number
  readonly height: number
  /** `[height, width, 3]`, row-major. */
  readonly data: Uint8Array

  /** @throws RankwiseError `IMAGE_SIZE` when `data` does not hold `height * width * 3` bytes */
  constructor(width: number, height: number, data: Uint8Array) {
    if (!areSizes(width, height) || data.length !== width * height * CHANNELS) {
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
   * Reads a PNG or JPEG, whatever its name ends in, as diffusers' `load_image` does: turned as its EXIF data says and
   * converted to RGB, without an alpha channel.
   *
   * @throws RankwiseError `IMAGE_READ` when there is no such file, `IMAGE_FORMAT` when it is neither or is damaged,
   *   `IMAGE_TOO_LARGE` for more than 178956970 pixels, before they are decoded
   */
  static async open(path: string): Promise<Image> {
    return decodeImage(await readImageFile(path), path)
  }

  /** As `open`, of the bytes of a file. @throws RankwiseError `IMAGE_FORMAT`, `IMAGE_TOO_LARGE` */
  static from(bytes: Uint8Array): Promise<Image> {
    return decodeImage(bytes, undefined)
  }

  /**
   * Decodes a PNG at once: RGB, greyscale or palette. An alpha channel is dropped and 16 bits a channel become 8, as by
   * Pillow's `convert('RGB')`.
   *
   * @throws RankwiseError `IMAGE_FORMAT` when the bytes are no PNG, are damaged or of another kind; `IMAGE_TOO_LARGE`
   */
  static fromPng(bytes: Uint8Array): Image {
    return toImage(decodePng(bytes))
  }

  /**
   * The image in another size, by Lanczos resampling; the same bits as `resize(size, LANCZOS)` of Pillow 13.
   *
   * @throws RankwiseError `IMAGE_SIZE` when a side is not a positive whole number
   */
  resize(width: number, height: number): Image {
    if (!areSizes(width, height)) {
      throw new RankwiseError('IMAGE_SIZE', 'an image cannot have this size', {
        actual: { width, height },
        rule: 'width and height are positive whole numbers',
      })
    }
    return toImage(resizeLanczos(this, width, height))
  }

  /**
   * The part from the middle. Where an odd number of pixels falls away, one more does at the right and at the bottom.
   *
   * @throws RankwiseError `IMAGE_SIZE` when the part is larger than the image
   */
  centerCrop(width: number, height: number): Image {
    if (!areSizes(width, height) || width > this.width || height > this.height) {
      throw new RankwiseError('IMAGE_SIZE', 'the part does not lie in the image', {
        actual: { width, height, imageWidth: this.width, imageHeight: this.height },
        rule: 'width and height are positive and at most those of the image',
      })
    }
    const left = Math.floor((this.width - width) / 2)
    const top = Math.floor((this.height - height) / 2)
    const data = new Uint8Array(width * height * CHANNELS)
    for (let row = 0; row < height; row++) {
      const first = ((top + row) * this.width + left) * CHANNELS
      data.set(this.data.subarray(first, first + width * CHANNELS), row * width * CHANNELS)
    }
    return new Image(width, height, data)
  }

  /** The image as a PNG file. */
  toPng(): Uint8Array {
    return encodePng(this)
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
      throw new RankwiseError('IMAGE_WRITE', 'the image cannot be written', {
        where: path,
        actual: { reason: (cause as NodeJS.ErrnoException).code ?? String(cause) },
        cause,
      })
    }
  }
}

/**
 * The image itself, or what is read and decoded from a path or bytes.
 *
 * @param name - of the input, for errors; of a file its path is named. @default none
 * @throws RankwiseError `IMAGE_INPUT` for anything else, and those of `Image.open`
 */
export async function loadImage(input: ImageInput, name?: string): Promise<Image> {
  if (input instanceof Image) return input
  if (typeof input === 'string') return Image.open(input)
  if (input instanceof Uint8Array) return decodeImage(input, name)
  throw new RankwiseError('IMAGE_INPUT', 'this is not an image', {
    ...(name === undefined ? {} : { where: name }),
    actual: { given: input === null ? 'null' : typeof input },
    rule: 'an image is an Image, the path of a PNG or JPEG file, or the bytes of one',
  })
}

function areSizes(...sizes: readonly number[]): boolean {
  return sizes.every((size) => Number.isSafeInteger(size) && size > 0)
}

function toImage({ width, height, data }: Pixels): Image {
  return new Image(width, height, data)
}

async function decodeImage(bytes: Uint8Array, where: string | undefined): Promise<Image> {
  if (isPng(bytes)) return toImage(decodePng(bytes, where))
  if (isJpeg(bytes)) return toImage(await decodeJpeg(bytes, where))
  throw imageFormat('neither a PNG nor a JPEG', where, {
    actual: { bytes: bytes.length, first: Buffer.from(bytes.subarray(0, 8)).toString('hex') },
    rule: 'an image file is a PNG or a JPEG',
  })
}

async function readImageFile(path: string): Promise<Uint8Array> {
  try {
    // A pipe or a device may never end.
    if ((await stat(path)).isFile()) return await readFile(path)
  } catch (cause) {
    throw new RankwiseError('IMAGE_READ', 'the image cannot be read', { where: path, cause })
  }
  throw new RankwiseError('IMAGE_READ', 'this is not a file', { where: path, rule: 'the path is that of a file' })
}

import { inflateSync } from 'node:zlib'
import { convertIndexedToRgb, type DecodedPng, decode, encode } from 'fast-png'
import { exifOrientation, orient } from './image-orientation.ts'
import { CHANNELS, imageFormat, type Pixels, requireDecodable } from './image-pixels.ts'

const SIGNATURE = [0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]

/** Chunks that say what the pixels are. Others are not looked at: a colour profile alone can inflate to gigabytes. */
const CRITICAL = ['IHDR', 'PLTE', 'IDAT', 'IEND']

/** Samples a pixel, by the colour type in the header. */
const SAMPLES: Readonly<Record<number, number>> = { 0: 1, 2: 3, 3: 1, 4: 2, 6: 4 }

interface PngHeader {
  readonly width: number
  readonly height: number
  readonly depth: number
  readonly colorType: number
  readonly isInterlaced: boolean
}

/** A chunk's content, and all of it with length, name and checksum. */
interface Chunk {
  readonly type: string
  readonly content: Uint8Array
  readonly whole: Uint8Array
}

/** Whether the bytes begin as a PNG does. */
export function isPng(bytes: Uint8Array): boolean {
  return SIGNATURE.every((byte, i) => bytes[i] === byte)
}

/**
 * Decodes a PNG as Pillow's `convert('RGB')` does: of 16 bits a channel the upper 8 are taken, an alpha channel is
 * dropped. It is turned as its EXIF data says.
 *
 * @param where - the file, for errors
 * @throws RankwiseError `IMAGE_FORMAT` for what is no PNG, is damaged or is not implemented; `IMAGE_TOO_LARGE`
 */
export function decodePng(bytes: Uint8Array, where?: string): Pixels {
  if (!isPng(bytes)) throw imageFormat('the bytes are no PNG', where, { actual: { bytes: bytes.length } })
  const chunks = readChunks(bytes, where)
  const header = readHeader(chunks, where)
  requireDecodable(header.width, header.height, where)
  requireImplemented(header, where)
  requirePixels(header, chunks, where)
  const critical = chunks.filter(({ type }) => CRITICAL.includes(type)).map(({ whole }) => whole)
  const data = decodeCritical(Buffer.concat([Uint8Array.from(SIGNATURE), ...critical]), where)
  const exif = chunks.find(({ type }) => type === 'eXIf')?.content
  return orient({ width: header.width, height: header.height, data }, exifOrientation(exif))
}

/** Pixels as a PNG file. */
export function encodePng({ width, height, data }: Pixels): Uint8Array {
  return encode({ width, height, data, channels: CHANNELS, depth: 8 })
}

function readChunks(bytes: Uint8Array, where: string | undefined): Chunk[] {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength)
  const chunks: Chunk[] = []
  let offset = SIGNATURE.length
  while (chunks.at(-1)?.type !== 'IEND') {
    const length = offset + 12 <= bytes.length ? view.getUint32(offset) : Number.POSITIVE_INFINITY
    const end = offset + 12 + length
    if (end > bytes.length) throw imageFormat('the PNG is cut off', where, { actual: { bytes: bytes.length } })
    const type = Buffer.from(bytes.subarray(offset + 4, offset + 8)).toString('latin1')
    chunks.push({ type, content: bytes.subarray(offset + 8, end - 4), whole: bytes.subarray(offset, end) })
    offset = end
  }
  return chunks
}

function readHeader(chunks: readonly Chunk[], where: string | undefined): PngHeader {
  const [first] = chunks as [Chunk]
  if (first.type !== 'IHDR' || first.content.length !== 13) throw imageFormat('the PNG has no header', where)
  const view = new DataView(first.content.buffer, first.content.byteOffset)
  return {
    width: view.getUint32(0),
    height: view.getUint32(4),
    depth: view.getUint8(8),
    colorType: view.getUint8(9),
    isInterlaced: view.getUint8(12) !== 0,
  }
}

function requireImplemented({ depth, colorType, isInterlaced }: PngHeader, where: string | undefined): void {
  const isKnown = SAMPLES[colorType] !== undefined && [1, 2, 4, 8, 16].includes(depth)
  // Pillow limits grey of 16 bits to 255 instead of scaling it, which gives a white picture.
  const isDeepGrey = colorType === 0 && depth === 16
  // fast-png takes samples that are smaller than a byte for bytes when they are interlaced.
  if (isKnown && !isDeepGrey && !(isInterlaced && depth < 8)) return
  throw imageFormat('the PNG has another pixel format', where, {
    actual: { bitsPerChannel: depth, colorType, interlaced: isInterlaced },
    rule: '8 or 16 bits a channel; greys and palettes of up to 8 bits, interlaced only of 8',
    remedy: 'save it as RGB of 8 bits a channel',
  })
}

/** Refuses pixel data that is not what the header says, before the decoder inflates it without a limit. */
function requirePixels(header: PngHeader, chunks: readonly Chunk[], where: string | undefined): void {
  const compressed = chunks.filter(({ type }) => type === 'IDAT').map(({ content }) => content)
  const expected = filteredBytes(header)
  let inflated: number
  try {
    inflated = inflateSync(Buffer.concat(compressed), { maxOutputLength: expected }).length
  } catch (cause) {
    throw imageFormat('the pixels of the PNG are damaged, or more than its size', where, {
      actual: { width: header.width, height: header.height },
      rule: `the pixel data inflates to ${expected} bytes`,
      cause,
    })
  }
  if (inflated === expected) return
  throw imageFormat('the PNG has fewer pixels than its size', where, {
    actual: { bytes: inflated },
    rule: `the pixel data inflates to ${expected} bytes`,
  })
}

/** First column and row, and steps, of the passes of an interlaced PNG (Adam7). */
const PASSES = [
  [0, 0, 8, 8],
  [4, 0, 8, 8],
  [0, 4, 4, 8],
  [2, 0, 4, 4],
  [0, 2, 2, 4],
  [1, 0, 2, 2],
  [0, 1, 1, 2],
] as const

/** Bytes of the rows, each behind a byte that names its filter. */
function filteredBytes({ width, height, depth, colorType, isInterlaced }: PngHeader): number {
  const bitsPerPixel = (SAMPLES[colorType] as number) * depth
  const passes = isInterlaced ? PASSES : ([[0, 0, 1, 1]] as const)
  return passes.reduce((bytes, [x, y, xStep, yStep]) => {
    const [columns, rows] = [Math.ceil((width - x) / xStep), Math.ceil((height - y) / yStep)]
    return columns > 0 && rows > 0 ? bytes + rows * (1 + Math.ceil((columns * bitsPerPixel) / 8)) : bytes
  }, 0)
}

function decodeCritical(bytes: Uint8Array, where: string | undefined): Uint8Array {
  try {
    const png = decode(bytes, { checkCrc: true })
    return png.palette === undefined ? rgbOf(png) : convertIndexedToRgb(png)
  } catch (cause) {
    throw imageFormat('the PNG is damaged', where, { actual: { bytes: bytes.length }, cause })
  }
}

function rgbOf(png: DecodedPng): Uint8Array {
  return png.depth < 8 ? toRgb(unpack(png), 1) : toRgb(upperBytes(png.data), png.channels)
}

function upperBytes(samples: DecodedPng['data']): Uint8Array {
  if (!(samples instanceof Uint16Array)) return samples as Uint8Array
  const bytes = new Uint8Array(samples.length)
  for (let i = 0; i < bytes.length; i++) bytes[i] = (samples[i] as number) >> 8
  return bytes
}

/** Greys of 1, 2 or 4 bits, scaled to 8. */
function unpack({ width, height, depth, data }: DecodedPng): Uint8Array {
  const perByte = 8 / depth
  const largest = 2 ** depth - 1
  const bytesPerRow = Math.ceil(width / perByte)
  const samples = new Uint8Array(width * height)
  for (let i = 0; i < samples.length; i++) {
    const column = i % width
    const byte = data[Math.floor(i / width) * bytesPerRow + Math.floor(column / perByte)] as number
    const sample = (byte >> (8 - depth * ((column % perByte) + 1))) & largest
    samples[i] = (sample * 255) / largest
  }
  return samples
}

/** Samples of `channels` a pixel (1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha) without alpha. */
function toRgb(samples: Uint8Array, channels: number): Uint8Array {
  if (channels === CHANNELS) return samples
  const grey = channels < CHANNELS
  const rgb = new Uint8Array((samples.length / channels) * CHANNELS)
  for (let i = 0; i < rgb.length; i++) {
    const pixel = Math.floor(i / CHANNELS) * channels
    rgb[i] = samples[grey ? pixel : pixel + (i % CHANNELS)] as number
  }
  return rgb
}

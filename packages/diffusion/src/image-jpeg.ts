import type { RankwiseError } from '@rankwise/core'
import { exifOrientation, orient } from './image-orientation.ts'
import { CHANNELS, imageFormat, type Pixels, requireDecodable } from './image-pixels.ts'

interface JpegHeader {
  readonly width: number
  readonly height: number
  readonly components: number
  readonly bits: number
  readonly exif: Uint8Array | undefined
}

interface Segment {
  readonly marker: number
  readonly content: Uint8Array
}

const START_OF_IMAGE = 0xd8
const START_OF_SCAN = 0xda
const APP1 = 0xe1

/** Whether the bytes begin as a JPEG does. */
export function isJpeg(bytes: Uint8Array): boolean {
  return bytes[0] === 0xff && bytes[1] === START_OF_IMAGE && bytes[2] === 0xff
}

/**
 * Decodes a JPEG, baseline or progressive, grey or colour, and turns it as its EXIF data says. The decoder is
 * libjpeg-turbo, which Pillow has as well: pixels are the same bit for bit. A decoder of another family (jpeg-js) is up
 * to 61 levels away where colour is subsampled.
 *
 * @param where - the file, for errors
 * @throws RankwiseError `IMAGE_FORMAT` for damaged files, CMYK and depths other than 8 bits; `IMAGE_TOO_LARGE`
 */
export async function decodeJpeg(bytes: Uint8Array, where?: string): Promise<Pixels> {
  const header = readHeader(bytes, where)
  requireDecodable(header.width, header.height, where)
  if (header.bits !== 8 || (header.components !== 1 && header.components !== CHANNELS)) {
    throw imageFormat('the JPEG has another colour format', where, {
      actual: { components: header.components, bitsPerComponent: header.bits },
      rule: 'it is grey or RGB (or YCbCr) of 8 bits a component, not CMYK',
      remedy: 'convert it to RGB',
    })
  }
  return orient(await decode(bytes, header, where), exifOrientation(header.exif))
}

async function decode(bytes: Uint8Array, header: JpegHeader, where: string | undefined): Promise<Pixels> {
  const { default: createModule } = await import('@cornerstonejs/codec-libjpeg-turbo-8bit/decodewasmjs')
  // A module of its own for every file (3 ms): WebAssembly memory never shrinks, and a failed decode leaks there.
  const decoder = new (await createModule()).JPEGDecoder()
  try {
    decoder.getEncodedBuffer(bytes.length).set(bytes)
    decoder.decode()
  } catch (cause) {
    throw damaged(bytes, where, cause)
  }
  const { width, height, componentCount } = decoder.getFrameInfo()
  if (width !== header.width || height !== header.height || componentCount !== header.components) {
    throw damaged(bytes, where)
  }
  return { width, height, data: toRgb(decoder.getDecodedBuffer(), componentCount) }
}

/** A copy outside of the decoder's memory. */
function toRgb(samples: Uint8ClampedArray, components: number): Uint8Array {
  if (components === CHANNELS) return new Uint8Array(samples)
  const rgb = new Uint8Array(samples.length * CHANNELS)
  for (let i = 0; i < samples.length; i++) rgb.fill(samples[i] as number, i * CHANNELS, (i + 1) * CHANNELS)
  return rgb
}

function readHeader(bytes: Uint8Array, where: string | undefined): JpegHeader {
  let frame: Uint8Array | undefined
  let exif: Uint8Array | undefined
  for (const { marker, content } of segments(bytes, where)) {
    if (isFrame(marker)) frame ??= content
    if (marker === APP1 && isExif(content)) exif ??= content
  }
  if (frame === undefined || frame.length < 6) throw damaged(bytes, where)
  const view = new DataView(frame.buffer, frame.byteOffset)
  return {
    bits: view.getUint8(0),
    height: view.getUint16(1),
    width: view.getUint16(3),
    components: view.getUint8(5),
    exif,
  }
}

/** The segments before the first scan: ITU-T T.81, annex B. */
function* segments(bytes: Uint8Array, where: string | undefined): Generator<Segment> {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength)
  let offset = 2
  while (offset + 4 <= bytes.length) {
    if (bytes[offset] !== 0xff) throw damaged(bytes, where)
    const marker = bytes[offset + 1] as number
    if (marker === START_OF_SCAN) return
    if (marker === 0xff) {
      // Any number of them may stand before a marker.
      offset++
      continue
    }
    const end = offset + 2 + view.getUint16(offset + 2)
    if (end < offset + 4 || end > bytes.length) throw damaged(bytes, where)
    yield { marker, content: bytes.subarray(offset + 4, end) }
    offset = end
  }
}

/** SOF0 to SOF15, among which are three other markers: DHT, JPG and DAC. */
function isFrame(marker: number): boolean {
  return marker >= 0xc0 && marker <= 0xcf && marker !== 0xc4 && marker !== 0xc8 && marker !== 0xcc
}

function isExif(content: Uint8Array): boolean {
  return Buffer.from(content.subarray(0, 6)).toString('latin1') === 'Exif\0\0'
}

function damaged(bytes: Uint8Array, where: string | undefined, cause?: unknown): RankwiseError {
  return imageFormat('the JPEG is damaged', where, { actual: { bytes: bytes.length }, cause })
}

import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { crc32, deflateSync } from 'node:zlib'
import { RankwiseError, readSafetensors, type Tensor } from '@rankwise/core'
import fc from 'fast-check'
import { encode } from 'fast-png'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { Image, loadImage } from '../src/image.ts'
import { exifOrientation, orient } from '../src/image-orientation.ts'
import { codeOf } from './support.ts'

/** Files as Pillow wrote them, and their pixels as diffusers' `load_image` gives them under `<name>.rgb`. */
const goldens = await readSafetensors(new URL('goldens/images.safetensors', import.meta.url).pathname)
const golden = (name: string) => goldens.get(name) as Tensor<'uint8'>
const decodable = [...goldens.keys()].filter((name) => goldens.has(`${name}.rgb`))

let folder: string
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'rankwise-image-files-'))
})
afterAll(() => rm(folder, { recursive: true }))

async function fileOf(name: string, content: Uint8Array): Promise<string> {
  const path = join(folder, name)
  await writeFile(path, content)
  return path
}

describe('a file', () => {
  it.each(decodable)('has the pixels that diffusers reads: %s', async (name) => {
    const expected = golden(`${name}.rgb`)
    const image = await Image.from(golden(name).data)
    expect([image.height, image.width, 3]).toEqual(expected.shape)
    expect(image.data).toEqual(expected.data)
  })

  it('is told by its content, not by its name', async () => {
    const path = await fileOf('picture.png', golden('jpeg.420').data)
    expect((await Image.open(path)).data).toEqual(golden('jpeg.420.rgb').data)
  })

  it('may lie anywhere in a buffer', async () => {
    const file = golden('jpeg.orientation6').data
    const buffer = Buffer.concat([Buffer.alloc(13, 0xff), file, Buffer.alloc(5)])
    const image = await Image.from(buffer.subarray(13, 13 + file.length))
    expect(image.data).toEqual(golden('jpeg.orientation6.rgb').data)
  })

  it('or its bytes or an image are an image', async () => {
    const image = await Image.from(golden('png.rgb').data)
    const path = await fileOf('rgb.png', golden('png.rgb').data)
    expect(await loadImage(path)).toEqual(image)
    expect(await loadImage(golden('png.rgb').data)).toEqual(image)
    expect(await loadImage(image)).toBe(image)
    expect(await codeOf(() => loadImage(new ArrayBuffer(8) as unknown as Uint8Array))).toBe('IMAGE_INPUT')
  })
})

describe('a bad file', () => {
  const errorOf = async (action: () => Promise<unknown>) => {
    const error = await action().then(
      () => undefined,
      (error: unknown) => error,
    )
    if (error instanceof RankwiseError) return error
    throw new Error(`expected a RankwiseError, got ${error}`)
  }

  it('is named', async () => {
    const missing = join(folder, 'missing.png')
    expect(await errorOf(() => Image.open(missing))).toMatchObject({ code: 'IMAGE_READ', where: missing })
    expect(await errorOf(() => Image.open(folder))).toMatchObject({ code: 'IMAGE_READ', where: folder })
    expect(await errorOf(() => Image.open('/dev/null'))).toMatchObject({ code: 'IMAGE_READ', where: '/dev/null' })
    for (const [name, content] of [
      ['text.jpg', Buffer.from('no picture')],
      ['empty.png', new Uint8Array()],
      ['cut.jpg', golden('jpeg.420').data.subarray(0, 700)],
      ['cmyk.jpg', golden('jpeg.cmyk').data],
      ['cut.png', golden('png.rgb').data.subarray(0, 60)],
    ] as const) {
      const path = await fileOf(name, content)
      expect(await errorOf(() => Image.open(path))).toMatchObject({ code: 'IMAGE_FORMAT', where: path })
    }
  })

  it('is refused wherever it is cut off', async () => {
    for (const name of ['jpeg.420', 'jpeg.progressive', 'png.rgb', 'png.palette4']) {
      const { data } = golden(name)
      await fc.assert(
        fc.asyncProperty(fc.integer({ min: 0, max: data.length - 40 }), async (length) => {
          expect(await codeOf(() => Image.from(data.subarray(0, length)))).toBe('IMAGE_FORMAT')
        }),
        { numRuns: 25 },
      )
    }
  })

  it('fails with an error of its own or not at all, wherever a byte is changed', async () => {
    for (const name of ['jpeg.420', 'jpeg.orientation6', 'png.orientation6', 'png.palette4', 'png.rgb16']) {
      const { data } = golden(name)
      const change = fc.tuple(fc.nat(data.length - 1), fc.integer({ min: 0, max: 255 }))
      await fc.assert(
        fc.asyncProperty(change, async ([at, byte]) => {
          const changed = Uint8Array.from(data)
          changed[at] = byte
          expect(['no error', 'IMAGE_FORMAT', 'IMAGE_TOO_LARGE']).toContain(await codeOf(() => Image.from(changed)))
        }),
        { numRuns: 60 },
      )
    }
  })

  it('decodes after one that failed', async () => {
    await codeOf(() => Image.from(golden('jpeg.420').data.subarray(0, 700)))
    expect((await Image.from(golden('jpeg.444').data)).data).toEqual(golden('jpeg.444.rgb').data)
  })
})

describe('a bomb is refused before it is decoded', () => {
  it('by the size in a PNG header', async () => {
    const bytes = png({ width: 50_000, height: 50_000, pixels: new Uint8Array(10) })
    expect(await codeOf(() => Image.from(bytes))).toBe('IMAGE_TOO_LARGE')
    expect(await codeOf(() => Image.fromPng(bytes))).toBe('IMAGE_TOO_LARGE')
    const path = await fileOf('bomb.png', bytes)
    await expect(Image.open(path)).rejects.toMatchObject({ where: path, actual: { width: 50_000, height: 50_000 } })
  })

  it('by the size in a JPEG header', async () => {
    const bytes = Uint8Array.from(golden('jpeg.420').data)
    const frame = bytes.findIndex((byte, i) => byte === 0xff && bytes[i + 1] === 0xc0)
    new DataView(bytes.buffer).setUint16(frame + 5, 60_000)
    new DataView(bytes.buffer).setUint16(frame + 7, 60_000)
    expect(await codeOf(() => Image.from(bytes))).toBe('IMAGE_TOO_LARGE')
  })

  it('when pixels inflate to more than their size', async () => {
    const bytes = png({ width: 1, height: 1, pixels: new Uint8Array(50_000_000) })
    const before = process.memoryUsage().arrayBuffers
    expect(await codeOf(() => Image.from(bytes))).toBe('IMAGE_FORMAT')
    expect(process.memoryUsage().arrayBuffers - before).toBeLessThan(20_000_000)
  })

  it('when a colour profile does', async () => {
    const profile = Buffer.concat([Buffer.from('name\0\0'), deflateSync(new Uint8Array(200_000_000))])
    const bytes = png({ width: 1, height: 1, pixels: Uint8Array.of(0, 1, 2, 3), before: chunk('iCCP', profile) })
    const before = process.memoryUsage().arrayBuffers
    expect([...(await Image.from(bytes)).data]).toEqual([1, 2, 3])
    expect(process.memoryUsage().arrayBuffers - before).toBeLessThan(100_000_000)
  })

  it('when it has fewer pixels than its size', async () => {
    const bytes = png({ width: 1000, height: 1000, pixels: new Uint8Array(100) })
    expect(await codeOf(() => Image.from(bytes))).toBe('IMAGE_FORMAT')
  })

  it('and a picture of no pixels too', async () => {
    expect(await codeOf(() => Image.from(png({ width: 0, height: 5, pixels: new Uint8Array(5) })))).toBe('IMAGE_FORMAT')
  })
})

describe('PNG of other kinds', () => {
  it('interlaced', async () => {
    const source = Uint8Array.from({ length: 11 * 9 * 3 }, (_, i) => (i * 37) % 256)
    const bytes = encode({ width: 11, height: 9, channels: 3, depth: 8, data: source }, { interlace: 'Adam7' })
    expect((await Image.from(bytes)).data).toEqual(source)
  })

  it('interlaced with samples smaller than a byte are refused', async () => {
    const bytes = png({ width: 8, height: 1, depth: 1, colorType: 0, interlace: 1, pixels: new Uint8Array(9) })
    expect(await codeOf(() => Image.from(bytes))).toBe('IMAGE_FORMAT')
  })

  it('a colour that the palette does not have', async () => {
    const palette = chunk('PLTE', Uint8Array.of(1, 2, 3))
    const bytes = png({ width: 2, height: 1, colorType: 3, pixels: Uint8Array.of(0, 0, 1), before: palette })
    expect(await codeOf(() => Image.from(bytes))).toBe('IMAGE_FORMAT')
  })
})

describe('orientation', () => {
  it('is upright where EXIF data is missing, broken or says nonsense', () => {
    expect(exifOrientation(undefined)).toBe(1)
    expect(exifOrientation(Buffer.from('Exif\0\0MM'))).toBe(1)
    expect(exifOrientation(tiffWithOrientation(9))).toBe(1)
    expect(exifOrientation(tiffWithOrientation(0))).toBe(1)
    expect(exifOrientation(tiffWithOrientation(6))).toBe(6)
  })

  it('is undone by its inverse', () => {
    const pixels = { width: 5, height: 3, data: Uint8Array.from({ length: 45 }, (_, i) => i) }
    const inverses = [1, 2, 3, 4, 5, 8, 7, 6] as const
    for (const [i, inverse] of inverses.entries()) {
      expect(orient(orient(pixels, (i + 1) as typeof inverse), inverse)).toEqual(pixels)
    }
  })
})

/** A little-endian TIFF directory with one tag. */
function tiffWithOrientation(orientation: number): Buffer {
  const bytes = Buffer.from('49492a0008000000010012010300010000000000000000000000', 'hex')
  bytes.writeUInt16LE(orientation, 18)
  return bytes
}

interface PngParts {
  readonly width: number
  readonly height: number
  readonly depth?: number
  readonly colorType?: number
  readonly interlace?: number
  /** Rows with their filter bytes, not compressed. */
  readonly pixels: Uint8Array
  /** Chunks before the pixels. */
  readonly before?: Uint8Array
}

function png({ width, height, depth = 8, colorType = 2, interlace = 0, pixels, before }: PngParts): Uint8Array {
  const header = Buffer.alloc(13)
  header.writeUInt32BE(width, 0)
  header.writeUInt32BE(height, 4)
  header.set([depth, colorType, 0, 0, interlace], 8)
  const signature = Buffer.from('89504e470d0a1a0a', 'hex')
  const rest = [chunk('IDAT', deflateSync(pixels)), chunk('IEND', new Uint8Array())]
  return Buffer.concat([signature, chunk('IHDR', header), before ?? new Uint8Array(), ...rest])
}

function chunk(type: string, content: Uint8Array): Buffer {
  const body = Buffer.concat([Buffer.from(type), content])
  const frame = Buffer.alloc(8)
  frame.writeUInt32BE(content.length, 0)
  frame.writeUInt32BE(crc32(body), 4)
  return Buffer.concat([frame.subarray(0, 4), body, frame.subarray(4)])
}

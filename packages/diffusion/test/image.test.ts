import { mkdir, mkdtemp, readdir, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { sizeOf, Tensor } from '@rankwise/core'
import { referencePath } from '@rankwise/fixtures'
import fc from 'fast-check'
import { decode, encode } from 'fast-png'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { Image } from '../src/image.ts'
import { postprocess } from '../src/image-processor.ts'
import { type LatentDType, roundingOf } from '../src/rounding.ts'
import { codeOf, differingElements, goldenTensors } from './support.ts'

const gradient = (width: number, height: number) =>
  new Image(
    width,
    height,
    Uint8Array.from({ length: width * height * 3 }, (_, i) => (i * 7) % 256),
  )

describe('postprocess', () => {
  it.each(['flux2-tiny', 'flux2-klein-tiny'])('agrees with diffusers on what the VAE of %s decodes', async (name) => {
    const golden = await goldenTensors('vae', `${name}.safetensors`)
    const decoded = golden('dec.image') as Tensor<'float32'>
    const array = postprocess(decoded, 'array')
    expect(array.shape).toEqual(golden('dec.image_np').shape)
    expect(differingElements(array.data, golden('dec.image_np').data)).toBe(0)

    const [image, ...rest] = postprocess(decoded)
    expect(rest).toEqual([])
    expect([image?.height, image?.width, 3]).toEqual(golden('dec.image_u8').shape)
    expect(image?.data).toEqual(golden('dec.image_u8').data)
  })

  it.each(['klein.t2i.128x128.distilled', 'klein-base.t2i.64x96.cfg4'])(
    'gives the pixels of the picture %s',
    async (run) => {
      const array = (await goldenTensors('pipeline', `${run}.safetensors`))('image') as Tensor<'float32'>
      const png = decode(await readFile(referencePath('goldens', 'pipeline', `${run}.png`)))
      const [image] = postprocess(decodedFrom(array))
      expect([image?.width, image?.height]).toEqual([png.width, png.height])
      expect(image?.data).toEqual(png.data)
    },
  )

  /** A decoder output that postprocessing turns back into `array`, whose values lie in [0, 1]: exact where v - 0.5 is. */
  function decodedFrom({ shape, data }: Tensor<'float32'>): Tensor<'float32'> {
    const [height = 0, width = 0] = shape
    const planes = new Float32Array(data.length)
    data.forEach((value, i) => {
      planes[(i % 3) * height * width + Math.floor(i / 3)] = (value - 0.5) * 2
    })
    return new Tensor('float32', [1, 3, height, width], planes)
  }

  it('rounds halves to even', () => {
    const scaled = (x: number) => Math.fround(Math.fround(Math.fround(x) * 0.5 + 0.5) * 255)
    const halves = Array.from({ length: 126 }, (_, i) => i + 128.5)
      .map((half) => ({ half, x: (half / 255) * 2 - 1 }))
      .filter(({ half, x }) => scaled(x) === half)
      .slice(0, 60)
    const [image] = postprocess(
      Tensor.float32(
        [1, 3, 1, 20],
        halves.map(({ x }) => x),
      ),
    )
    const bytes = halves.map((_, i) => image?.data[(i % 20) * 3 + Math.floor(i / 20)])
    expect(bytes).toEqual(halves.map(({ half }) => 2 * Math.round(half / 2)))
  })

  it('limits the range', () => {
    const [image] = postprocess(Tensor.float32([1, 3, 1, 2], [-1.01, 1.01, -3, 7, Number.NEGATIVE_INFINITY, 0]))
    expect([...(image as Image).data]).toEqual([0, 0, 0, 255, 255, 128])
  })

  it('rounds after every operation in bfloat16', () => {
    const round = roundingOf('bfloat16')
    const source = Tensor.float32([1, 3, 1, 1], [0.3, -0.7, 0.01]).cast('bfloat16')
    const values = [...source.cast('float32').data]
    expect([...postprocess(source, 'array').data]).toEqual(values.map((x) => round(round(x * 0.5) + 0.5)))
    expect(round((values[2] as number) * 0.5 + 0.5)).not.toBe((values[2] as number) * 0.5 + 0.5)
  })

  it('keeps the entries of a batch apart', () => {
    const shape = [2, 3, 2, 2]
    const batch = new Tensor(
      'float32',
      shape,
      Float32Array.from({ length: sizeOf(shape) }, (_, i) => i / 12 - 1),
    )
    const images = postprocess(batch)
    const single = (i: number) =>
      postprocess(new Tensor('float32', [1, 3, 2, 2], batch.data.slice(i * 12, i * 12 + 12)))
    expect(images).toEqual([...single(0), ...single(1)])
  })

  it('refuses other shapes, NaN and other dtypes', async () => {
    const nan = Tensor.float32([1, 3, 1, 1], [0, Number.NaN, 0])
    expect(await codeOf(() => postprocess(nan))).toBe('IMAGE_NAN')
    expect(await codeOf(() => postprocess(Tensor.zeros('float32', [1, 4, 2, 2])))).toBe('IMAGE_SHAPE')
    expect(await codeOf(() => postprocess(Tensor.zeros('float32', [3, 2, 2])))).toBe('IMAGE_SHAPE')
    const whole = Tensor.zeros('uint8', [1, 3, 2, 2]) as unknown as Tensor<LatentDType>
    expect(await codeOf(() => postprocess(whole))).toBe('DTYPE_UNSUPPORTED')
  })
})

describe('PNG', () => {
  it('comes back as it went', () => {
    const size = fc.integer({ min: 1, max: 20 })
    fc.assert(
      fc.property(size, size, fc.infiniteStream(fc.integer({ min: 0, max: 255 })), (width, height, bytes) => {
        const image = new Image(width, height, Uint8Array.from(bytes.take(width * height * 3)))
        expect(Image.fromPng(image.toPng())).toEqual(image)
      }),
    )
  })

  it('reads the files that Pillow wrote', async () => {
    const run = 'klein.t2i.128x128.distilled'
    const array = (await goldenTensors('pipeline', `${run}.safetensors`))('image')
    const image = Image.fromPng(await readFile(referencePath('goldens', 'pipeline', `${run}.png`)))
    const off = image.data.filter((value, i) => Math.abs(value - (array.data[i] as number) * 255) > 0.5001)
    expect([image.width, image.height, off.length]).toEqual([128, 128, 0])
  })

  it.each([
    ['grey', { channels: 1, data: [7, 9] }, [7, 7, 7, 9, 9, 9]],
    ['grey with alpha', { channels: 2, data: [7, 255, 9, 0] }, [7, 7, 7, 9, 9, 9]],
    ['RGB with alpha', { channels: 4, data: [1, 2, 3, 255, 4, 5, 6, 0] }, [1, 2, 3, 4, 5, 6]],
    [
      'palette',
      {
        channels: 1,
        data: [1, 0],
        palette: [
          [1, 2, 3],
          [4, 5, 6],
        ],
      },
      [4, 5, 6, 1, 2, 3],
    ],
  ])('reads %s as RGB', (_, png, expected) => {
    const bytes = encode({ width: 2, height: 1, ...png, data: Uint8Array.from(png.data) })
    expect([...Image.fromPng(bytes).data]).toEqual(expected)
  })

  it('refuses what is no PNG, is damaged or has greys of 16 bits', async () => {
    const damaged = gradient(4, 4).toPng()
    damaged[damaged.length - 20] = (damaged[damaged.length - 20] as number) ^ 1
    expect(await codeOf(() => Image.fromPng(damaged))).toBe('IMAGE_FORMAT')
    expect(await codeOf(() => Image.fromPng(new Uint8Array(10)))).toBe('IMAGE_FORMAT')
    const deep = encode({ width: 1, height: 1, channels: 1, depth: 16, data: new Uint16Array(1) })
    expect(await codeOf(() => Image.fromPng(deep))).toBe('IMAGE_FORMAT')
  })

  it.each([
    [0, 1, 0],
    [2, 2, 11],
    [1.5, 2, 9],
  ])('refuses an image of %s x %s with %s bytes', async (width, height, bytes) => {
    expect(await codeOf(() => new Image(width, height, new Uint8Array(bytes)))).toBe('IMAGE_SIZE')
  })
})

describe('save', () => {
  let folder: string
  beforeEach(async () => {
    folder = await mkdtemp(join(tmpdir(), 'rankwise-image-'))
  })
  afterEach(() => rm(folder, { recursive: true }))

  it('writes the file, over an older one too, and nothing else', async () => {
    const path = join(folder, 'picture.png')
    await writeFile(path, 'old')
    await gradient(5, 3).save(path)
    expect(Image.fromPng(await readFile(path))).toEqual(gradient(5, 3))
    expect(await readdir(folder)).toEqual(['picture.png'])
  })

  it('leaves nothing behind when it fails', async () => {
    await mkdir(join(folder, 'taken.png'))
    expect(await codeOf(() => gradient(2, 2).save(join(folder, 'taken.png')))).toBe('IMAGE_WRITE')
    expect(await codeOf(() => gradient(2, 2).save(join(folder, 'nowhere', 'a.png')))).toBe('IMAGE_WRITE')
    expect(await codeOf(() => gradient(2, 2).save(join(folder, 'picture.jpg')))).toBe('IMAGE_FORMAT')
    expect(await readdir(folder)).toEqual(['taken.png'])
  })
})

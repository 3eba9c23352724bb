import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { ort } from '@rankwise/backend-ort'
import type { Backend, RankwiseError, Tensor } from '@rankwise/core'
import { AutoencoderKLFlux2, Image, preprocess } from '@rankwise/diffusion'
import { expectClose, loadGolden, referencePath, relativeRms } from '@rankwise/fixtures'
import fc from 'fast-check'
import { afterAll, beforeAll, describe, expect, it, onTestFinished } from 'vitest'
import { limitedSize, preprocessReference } from '../src/image-processor.ts'
import { encodeReferenceImages } from '../src/index.ts'

const TOLERANCE = { relativeRms: 2e-5 }

const RUNS = [
  ['dev.i2i.64x64.size_from_ref', 'flux2-tiny', 64, 64],
  ['dev.i2i.64x96.one_ref', 'flux2-tiny', 96, 64],
  ['dev.i2i.64x96.two_refs', 'flux2-tiny', 96, 64],
  ['klein.i2i.64x96.distilled', 'flux2-klein-tiny', 96, 64],
  ['klein-base.i2i.64x96.cfg4', 'flux2-klein-tiny', 96, 64],
  ['klein-kv.i2i.64x96', 'flux2-klein-tiny', 96, 64],
] as const

let backend: Backend
const vaes = new Map<string, AutoencoderKLFlux2>()
beforeAll(async () => {
  backend = await ort({ device: 'cpu' })
  for (const name of ['flux2-tiny', 'flux2-klein-tiny']) {
    vaes.set(name, await AutoencoderKLFlux2.fromPretrained(referencePath(name), { subfolder: 'vae', backend }))
  }
})
afterAll(async () => {
  for (const vae of vaes.values()) await vae.dispose()
  await backend.dispose()
})
const vaeOf = (name: string) => vaes.get(name) as AutoencoderKLFlux2

type Golden = Awaited<ReturnType<typeof loadGolden>>

const loadRun = (run: string) => loadGolden(`pipeline/${run}.safetensors`)

/** The reference images of a run. */
function imagesOf(golden: Golden): Image[] {
  const names = [...golden.keys()].filter((name) => name.startsWith('ref_image_u8.')).sort()
  return names.map((name) => imageOf(golden.get(name)))
}

/** `[height, width, 3]` as an image. */
function imageOf({ shape, data }: Tensor): Image {
  return new Image(shape[1] as number, shape[0] as number, data as Uint8Array)
}

/** Ids of a golden, int64 `[1, tokens, 4]`, as numbers. */
const idsOf = (golden: Golden) => Array.from(golden.get('ref_ids').data as BigInt64Array, Number)

async function errorOf(action: () => unknown): Promise<RankwiseError> {
  try {
    await action()
  } catch (error) {
    return error as RankwiseError
  }
  throw new Error('there was no error')
}

describe('reference images', () => {
  it.each(RUNS)('are those of diffusers: %s', async (run, name, width, height) => {
    const golden = await loadRun(run)
    const encoded = await encodeReferenceImages(imagesOf(golden), { vae: vaeOf(name) })
    expectClose(encoded.latents, golden.get('ref_latents'), TOLERANCE)
    expect(encoded.ids.shape).toEqual(golden.get('ref_ids').shape.slice(1))
    expect([...encoded.ids.data]).toEqual(idsOf(golden))
    expect([encoded.width, encoded.height]).toEqual([width, height])
  })

  it('come as images, bytes or paths, one or several', async () => {
    const golden = await loadRun('dev.i2i.64x96.two_refs')
    const [first, second] = imagesOf(golden) as [Image, Image]
    const folder = await mkdtemp(join(tmpdir(), 'rankwise-references-'))
    onTestFinished(() => rm(folder, { recursive: true }))
    const path = join(folder, 'second.png')
    await second.save(path)
    const vae = vaeOf('flux2-tiny')
    const several = await encodeReferenceImages([first.toPng(), path], { vae })
    expect(several).toEqual(await encodeReferenceImages([first, second], { vae }))
    const one = await encodeReferenceImages(Buffer.from(first.toPng()), { vae })
    expect(one).toEqual(await encodeReferenceImages([first], { vae }))
    expect(one.latents.shape).toEqual([1, 24, 128])
  })

  it('a comparison notices what is wrong', async () => {
    const golden = await loadRun('dev.i2i.64x96.two_refs')
    const vae = vaeOf('flux2-tiny')
    const images = imagesOf(golden) as [Image, Image]
    const latentsOf = async (references: readonly Image[]) => (await encodeReferenceImages(references, { vae })).latents
    const expected = golden.get('ref_latents')
    const shifted = new Image(
      101,
      75,
      Uint8Array.from(images[0].data, (value) => Math.max(value - 1, 0)),
    )
    expect(relativeRms(await latentsOf([shifted, images[1]]), expected)).toBeGreaterThan(TOLERANCE.relativeRms)
    const corner = cropAt(images[0], 0, 0, 96, 64)
    expect(relativeRms(await latentsOf([corner, images[1]]), expected)).toBeGreaterThan(TOLERANCE.relativeRms)
    const swapped = await latentsOf([images[1], images[0]])
    expect(relativeRms(swapped, expected)).toBeGreaterThan(TOLERANCE.relativeRms)
  })

  it.each([
    [63, 64, 'REFERENCE_TOO_SMALL'],
    [64, 63, 'REFERENCE_TOO_SMALL'],
    [64, 513, 'REFERENCE_ASPECT_RATIO'],
    [577, 72, 'REFERENCE_ASPECT_RATIO'],
  ])('of %i x %i are refused', async (width, height, code) => {
    const good = plain(64, 64)
    const error = await errorOf(() => encodeReferenceImages([good, plain(width, height)], { vae: vaeOf('flux2-tiny') }))
    expect(error).toMatchObject({ code, where: 'image[1]', actual: { width, height } })
  })

  it.each([
    [64, 512],
    [576, 72],
  ])('of %i x %i are taken', async (width, height) => {
    const { width: cut } = await encodeReferenceImages(plain(width, height), { vae: vaeOf('flux2-tiny') })
    expect(cut).toBe(width)
  })

  it('that cannot be used are named', async () => {
    const vae = vaeOf('flux2-tiny')
    const code = async (input: unknown) => {
      const { code, where } = await errorOf(() => encodeReferenceImages(input as Image, { vae }))
      return [code, where]
    }
    const folder = await mkdtemp(join(tmpdir(), 'rankwise-references-'))
    onTestFinished(() => rm(folder, { recursive: true }))
    const text = join(folder, 'text.png')
    await writeFile(text, 'no picture')
    const small = join(folder, 'small.png')
    await plain(10, 10).save(small)
    expect(await code([])).toEqual(['REFERENCE_MISSING', 'image'])
    expect(await code([plain(64, 64), new Uint8Array(100)])).toEqual(['IMAGE_FORMAT', 'image[1]'])
    expect(await code(text)).toEqual(['IMAGE_FORMAT', text])
    expect(await code([small])).toEqual(['REFERENCE_TOO_SMALL', small])
    expect(await code(join(folder, 'none.png'))).toEqual(['IMAGE_READ', join(folder, 'none.png')])
    expect(await code([plain(64, 64), 7])).toEqual(['IMAGE_INPUT', 'image[1]'])
    expect(await code(null)).toEqual(['IMAGE_INPUT', 'image[0]'])
  })

  it('an aborted signal stops', async () => {
    const options = { vae: vaeOf('flux2-tiny'), signal: AbortSignal.abort() }
    expect((await errorOf(() => encodeReferenceImages(plain(64, 64), options))).code).toBe('ABORTED')
  })
})

describe('preprocessing', () => {
  it('cuts as diffusers does', async () => {
    const golden = await loadGolden('vae/image_preprocess.safetensors')
    const cut = preprocessReference(imageOf(golden.get('crop.in_u8')), 16, 'golden')
    expectClose(cut, golden.get('crop.out'), { relative: 0 })
  })

  it('scales to an area as diffusers does', async () => {
    const golden = await loadGolden('vae/image_preprocess.safetensors')
    const image = imageOf(golden.get('lanczos.in_u8'))
    const small = image.resize(...limitedSize(image.width, image.height, 3000))
    const expected = golden.get('lanczos.target_area_3000_u8')
    expect([small.height, small.width, 3]).toEqual(expected.shape)
    expect(small.data).toEqual(expected.data)
  })

  it('keeps what fits, down to the pixel', () => {
    const side = fc.integer({ min: 64, max: 160 })
    fc.assert(
      fc.property(side, side, fc.integer(), (width, height, seed) => {
        const image = noise(width, height, seed)
        const [columns, rows] = [width - (width % 16), height - (height % 16)]
        const left = Math.floor((width - columns) / 2)
        const top = Math.floor((height - rows) / 2)
        const { shape, data } = preprocessReference(image, 16, '')
        expect(shape).toEqual([1, 3, rows, columns])
        // Bytes: comparing the values one by one takes longer than all the rest.
        const expected = preprocess(cropAt(image, left, top, columns, rows)).data
        expect(Buffer.compare(Buffer.from(data.buffer), Buffer.from(expected.buffer))).toBe(0)
      }),
      { numRuns: 30 },
    )
  })

  it('scales to at most 1024 x 1024 pixels and nearly the same shape', () => {
    const side = fc.integer({ min: 64, max: 20_000 })
    fc.assert(
      fc.property(side, side, (width, height) => {
        const [columns, rows] = limitedSize(width, height)
        if (width * height <= 1024 * 1024) {
          expect([columns, rows]).toEqual([width, height])
          return
        }
        expect(columns * rows).toBeLessThanOrEqual(1024 * 1024)
        expect((columns + 1) * (rows + 1)).toBeGreaterThan(1024 * 1024)
        expect(Math.abs(columns - (rows * width) / height)).toBeLessThan(1 + width / height)
      }),
    )
  })

  it('scales what is larger, then cuts', () => {
    // 1500 x 800 is scaled to 1402 x 747.
    const { shape, data } = preprocessReference(noise(1500, 800, 3), 16, '')
    expect(shape).toEqual([1, 3, 736, 1392])
    const expected = preprocess(cropAt(noise(1500, 800, 3).resize(1402, 747), 5, 5, 1392, 736)).data
    expect(Buffer.compare(Buffer.from(data.buffer), Buffer.from(expected.buffer))).toBe(0)
  })
})

const plain = (width: number, height: number) => new Image(width, height, new Uint8Array(width * height * 3))

function noise(width: number, height: number, seed: number): Image {
  let state = seed >>> 0
  const next = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0
    return state >>> 24
  }
  return new Image(width, height, Uint8Array.from({ length: width * height * 3 }, next))
}

function cropAt(image: Image, left: number, top: number, width: number, height: number): Image {
  const data = Uint8Array.from({ length: width * height * 3 }, (_, i) => {
    const [x, y] = [Math.floor(i / 3) % width, Math.floor(i / 3 / width)]
    return image.data[((top + y) * image.width + left + x) * 3 + (i % 3)] as number
  })
  return new Image(width, height, data)
}

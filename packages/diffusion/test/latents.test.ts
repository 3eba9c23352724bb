import { readSafetensors, sizeOf, Tensor } from '@rankwise/core'
import { referencePath } from '@rankwise/fixtures'
import fc from 'fast-check'
import { beforeAll, describe, expect, it } from 'vitest'
import {
  denormalizeLatents,
  type LatentStatistics,
  latentStatistics,
  normalizeLatents,
  packLatents,
  patchifyLatents,
  prepareLatentIds,
  prepareTextIds,
  unpackLatents,
  unpatchifyLatents,
} from '../src/latents.ts'
import type { LatentDType } from '../src/rounding.ts'
import { codeOf, differingElements, goldenTensors } from './support.ts'

const BATCH_NORM_EPS = 1e-4

const numbered = (shape: readonly number[]) =>
  new Tensor(
    'float32',
    shape,
    Float32Array.from({ length: sizeOf(shape) }, (_, i) => i),
  )

function expectExact(actual: Tensor, expected: Tensor): void {
  expect([actual.dtype, actual.shape]).toEqual([expected.dtype, expected.shape])
  expect(differingElements(actual.data, expected.data)).toBe(0)
}

describe.each(['flux2-tiny', 'flux2-klein-tiny'])('the latents of %s', (name) => {
  let golden: (name: string) => Tensor<LatentDType>
  let statistics: LatentStatistics
  beforeAll(async () => {
    golden = (await goldenTensors('vae', `${name}.safetensors`)) as (name: string) => Tensor<LatentDType>
    statistics = { mean: golden('bn.mean'), std: golden('bn.std') }
  })

  it('take every step to the decoder exactly', () => {
    expectExact(unpackLatents(golden('dec.packed'), 2, 3), golden('dec.unpacked'))
    expectExact(denormalizeLatents(golden('dec.unpacked'), statistics), golden('dec.denormalised'))
    expectExact(unpatchifyLatents(golden('dec.denormalised')), golden('dec.unpatchified'))
  })

  it('take every step from the encoder exactly', () => {
    expectExact(patchifyLatents(golden('enc.mode')), golden('enc.patchified'))
    expectExact(normalizeLatents(golden('enc.patchified'), statistics), golden('enc.normalised'))
    expectExact(packLatents(golden('enc.normalised')), golden('enc.packed'))
  })

  it('have the statistics of the batch norm, the root within one unit in the last place', async () => {
    const vae = await readSafetensors(referencePath(name, 'vae', 'diffusion_pytorch_model.safetensors'))
    const running = (key: string) => vae.get(`bn.running_${key}`) as Tensor<LatentDType>
    const { mean, std } = latentStatistics(running('mean'), running('var'), BATCH_NORM_EPS, 'float32')
    expectExact(mean, statistics.mean)
    const bits = ({ data }: Tensor) => new Int32Array(data.buffer, data.byteOffset, data.length)
    const expected = bits(statistics.std)
    const off = bits(std).map((value, i) => Math.abs(value - (expected[i] as number)))
    expect(Math.max(...off)).toBeLessThanOrEqual(1)
  })

  it('lie at the positions of diffusers', () => {
    const [, , height = 0, width = 0] = golden('enc.patchified').shape
    expect([...prepareLatentIds(2, 3).data]).toEqual([...golden('dec.ids').data].map(Number))
    const references = [...golden('enc.image_ids').data].map((value, i) => (i % 4 === 0 ? 0 : Number(value)))
    expect([...prepareLatentIds(height, width).data]).toEqual(references)
  })

  it('can fail: transposed squares, or mean and deviation swapped, differ', () => {
    const [batch, channels, height = 0, width = 0] = golden('enc.mode').shape
    const swapped = { mean: statistics.std, std: statistics.mean }
    const wrong = denormalizeLatents(golden('dec.unpacked'), swapped)
    expect(differingElements(wrong.data, golden('dec.denormalised').data)).toBeGreaterThan(100)
    const misread = golden('enc.mode').reshape([batch as number, channels as number, width, height])
    expect(differingElements(patchifyLatents(misread).data, golden('enc.patchified').data)).toBeGreaterThan(100)
  })
})

describe('positions', () => {
  it('of text count the last axis, as in a whole pipeline run', async () => {
    const golden = await goldenTensors('pipeline', 'klein.t2i.128x128.distilled.safetensors')
    const text = prepareTextIds(512)
    expect(text.shape).toEqual([512, 4])
    expect([...text.data]).toEqual([...golden('txt_ids').data].map(Number))
    expect([...prepareLatentIds(8, 8).data]).toEqual([...golden('img_ids').data].map(Number))
  })
})

describe('layout', () => {
  const side = fc.integer({ min: 1, max: 5 })

  it('of channels is c * 4 + dy * 2 + dx', () => {
    const folded = patchifyLatents(numbered([1, 2, 2, 4]))
    expect(folded.shape).toEqual([1, 8, 1, 2])
    expect([...folded.data]).toEqual([0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15])
  })

  it('comes back from packing and folding, whatever the shape and dtype', () => {
    const dtype = fc.constantFrom<LatentDType>('float32', 'bfloat16', 'float16')
    fc.assert(
      fc.property(side, side, side, side, dtype, (batch, channels, height, width, type) => {
        const latents = numbered([batch, channels, height * 2, width * 2]).cast(type)
        expect(unpatchifyLatents(patchifyLatents(latents))).toEqual(latents)
        expect(unpackLatents(packLatents(latents), height * 2, width * 2)).toEqual(latents)
      }),
    )
  })

  it('is refused where it does not fit', async () => {
    expect(await codeOf(() => packLatents(numbered([2, 3, 4])))).toBe('LATENTS_SHAPE')
    expect(await codeOf(() => unpackLatents(numbered([1, 6, 2]), 2, 2))).toBe('LATENTS_SHAPE')
    expect(await codeOf(() => unpackLatents(numbered([6, 2]), 2, 3))).toBe('LATENTS_SHAPE')
    expect(await codeOf(() => patchifyLatents(numbered([1, 1, 3, 2])))).toBe('LATENTS_SHAPE')
    expect(await codeOf(() => unpatchifyLatents(numbered([1, 6, 2, 2])))).toBe('LATENTS_SHAPE')
    const statistics = { mean: numbered([3]), std: numbered([3]) }
    expect(await codeOf(() => denormalizeLatents(numbered([1, 2, 2, 2]), statistics))).toBe('LATENTS_SHAPE')
  })
})

describe('statistics in bfloat16', () => {
  it('round after every operation', () => {
    const variance = Tensor.float32([2], [0.7001, 2.013]).cast('bfloat16')
    const mean = Tensor.float32([2], [0.1, -3]).cast('bfloat16')
    const { std } = latentStatistics(mean, variance, BATCH_NORM_EPS, 'bfloat16')
    expect([...std.cast('float32').data]).toEqual([0.8359375, 1.421875])
    const latents = Tensor.float32([1, 2, 1, 1], [1.03, -0.33]).cast('bfloat16')
    const denormalized = denormalizeLatents(latents, { mean, std })
    // 1.03125 * 0.8359375 = 0.862... -> 0.86328125, + 0.10009765625 -> 0.96484375; by hand, as torch rounds.
    expect([...denormalized.cast('float32').data]).toEqual([0.96484375, -3.46875])
  })
})

import { ort } from '@rankwise/backend-ort'
import { type Backend, Tensor } from '@rankwise/core'
import { Generator } from '@rankwise/diffusion'
import { referencePath, relativeRms } from '@rankwise/fixtures'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { Flux2Transformer2DModel } from '../src/index.ts'

const [TEXT, REFERENCES, IMAGE] = [5, 3, 4]

let backend: Backend
let transformer: Flux2Transformer2DModel

beforeAll(async () => {
  backend = await ort({ device: 'cpu', threads: 1 })
  transformer = await Flux2Transformer2DModel.fromPretrained(referencePath('flux2-klein-tiny'), {
    subfolder: 'transformer',
    backend,
  })
})
afterAll(async () => {
  await transformer.dispose()
  await backend.dispose()
})

const generator = new Generator().manualSeed(1)
const image = generator.randn([1, IMAGE, 128])
const references = generator.randn([1, REFERENCES, 128])
const text = generator.randn([1, TEXT, 96])

function ids(tokens: number, t: number): number[][] {
  return Array.from({ length: tokens }, (_, i) => [t, i, 0, 0])
}

function inputs({ noise = image, reference = references, timestep = 0.5 } = {}) {
  const table = (rows: number[][]) => Tensor.int32([rows.length, 4], rows.flat())
  const common = {
    encoderHiddenStates: text,
    timestep: Tensor.float32([1], [timestep]),
    txtIds: table(Array.from({ length: TEXT }, (_, l) => [0, 0, 0, l])),
  }
  return {
    first: {
      ...common,
      hiddenStates: Tensor.float32([1, REFERENCES + IMAGE, 128], Float32Array.of(...reference.data, ...noise.data)),
      imgIds: table([...ids(REFERENCES, 10), ...ids(IMAGE, 0)]),
      referenceTokens: REFERENCES,
    },
    later: { ...common, hiddenStates: noise, imgIds: table(ids(IMAGE, 0)) },
  }
}

describe('the cache of references', () => {
  it('stands for them at any noise level and for any noise', async () => {
    const other = { noise: generator.randn([1, IMAGE, 128]), timestep: 0.9 }
    const { cache } = await transformer.extractReferences(inputs(other).first)
    using _cache = cache
    const { sample, cache: again } = await transformer.extractReferences(inputs().first)
    again.dispose()
    const cached = await transformer.runCached(inputs().later, cache)
    expect(sample.shape).toEqual([1, IMAGE, 128])
    expect(relativeRms(cached, sample)).toBeLessThan(1e-6)
  })

  it('matters: neither other references nor none predict the same', async () => {
    const { sample, cache } = await transformer.extractReferences(inputs().first)
    cache.dispose()
    const changed = await transformer.extractReferences(inputs({ reference: generator.randn([1, 3, 128]) }).first)
    changed.cache.dispose()
    const without = await transformer.run(inputs().later)
    const { referenceTokens: _, ...attended } = inputs().first
    const whole = await transformer.run(attended)
    const last = Tensor.float32([1, IMAGE, 128], (whole.data as Float32Array).slice(REFERENCES * 128))
    for (const other of [changed.sample, without, last]) {
      expect(relativeRms(other, sample)).toBeGreaterThan(1e-3)
    }
  })

  it('is refused once it is disposed', async () => {
    const { cache } = await transformer.extractReferences(inputs().first)
    cache.dispose()
    cache.dispose()
    await expect(transformer.runCached(inputs().later, cache)).rejects.toMatchObject({ code: 'TENSOR_DISPOSED' })
  })

  it.each([0, -1, 1.5, REFERENCES + IMAGE])('cannot be of %d of 7 tokens', async (referenceTokens) => {
    const call = transformer.extractReferences({ ...inputs().first, referenceTokens })
    await expect(call).rejects.toMatchObject({ code: 'TRANSFORMER_INPUT', where: 'referenceTokens' })
  })
})

import { castData, type DType, sizeOf } from '@rankwise/core'
import fc from 'fast-check'
import { beforeAll, describe, expect, it } from 'vitest'
import { boxMuller16 } from '../src/box-muller.ts'
import { Generator, type RandnDType, randnTensor } from '../src/generator.ts'
import { MersenneTwister } from '../src/mersenne-twister.ts'
import { codeOf, differingElements, goldenJson, goldenTensors, ownGoldenJson } from './support.ts'

interface RngGoldens {
  readonly raw_u32: Record<string, { first16: number[]; at_620_to_636: number[] }>
  readonly uniform24: Record<string, number[]>
  readonly sizes: number[]
}

interface TorchSamples {
  readonly neg5: number[]
  readonly default: number[]
  readonly f16_17: number[]
  readonly f16_15: number[]
  readonly rand64: number[]
}

const SEEDS = ['42', '0', '4294967301']
const DTYPES = { f32: 'float32', bf16: 'bfloat16' } as const

const seeded = (seed: number | bigint) => new Generator().manualSeed(seed)

let rng: RngGoldens
let torch: TorchSamples
let golden: Awaited<ReturnType<typeof goldenTensors>>
beforeAll(async () => {
  rng = await goldenJson('rng', 'rng.json')
  torch = await ownGoldenJson('torch.json')
  golden = await goldenTensors('rng', 'rng.safetensors')
})

describe('MersenneTwister', () => {
  it.each([...SEEDS, '18446744073709551615'])('gives the raw outputs of torch for seed %s, past two twists', (seed) => {
    const twister = new MersenneTwister(Number(BigInt(seed) & 0xffffffffn))
    const words = Array.from({ length: 636 }, () => twister.nextUint32())
    expect(words.slice(0, 16)).toEqual(rng.raw_u32[seed]?.first16)
    expect(words.slice(620, 636)).toEqual(rng.raw_u32[seed]?.at_620_to_636)
  })
})

describe('randn', () => {
  for (const seed of SEEDS) {
    for (const [name, dtype] of Object.entries(DTYPES)) {
      it(`is bit-exact for seed ${seed} in ${dtype}, at every size`, () => {
        for (const size of rng.sizes) {
          const expected = golden(`seed${seed}.${name}.n${size}`)
          const actual = seeded(BigInt(seed)).randn([size], { dtype })
          expect(actual.dtype).toBe(dtype)
          expect(differingElements(actual.data, expected.data), `n = ${size}`).toBe(0)
        }
      })
    }

    it(`is within 3 units in the last place for seed ${seed} in float64`, () => {
      for (const size of [15, 17]) {
        const expected = golden(`seed${seed}.f64.n${size}`).data as Float64Array
        const actual = seeded(BigInt(seed)).randn([size], { dtype: 'float64' }).data
        expected.forEach((value, i) => {
          expect(Math.abs((actual[i] as number) - value)).toBeLessThanOrEqual(3 * 2 ** -52 * Math.abs(value))
        })
      }
    })
  }

  it.each(Object.entries(DTYPES))('is bit-exact for the noise of a 256x256 image in %s', (name, dtype) => {
    const shape = [1, 128, 16, 16]
    const actual = seeded(42).randn(shape, { dtype })
    expect(actual.shape).toEqual(shape)
    expect(differingElements(actual.data, golden(`seed42.${name}.latents_1x128x16x16`).data)).toBe(0)
  })

  it('keeps the spare of a small draw across draws in blocks', () => {
    const generator = seeded(42)
    for (const [i, size] of [3, 16, 1, 5, 17, 2].entries()) {
      const actual = generator.randn([size])
      expect(differingElements(actual.data, golden(`seed42.f32.seq${i}_n${size}`).data), `call ${i}`).toBe(0)
    }
  })

  it('is bit-exact in float16, with the tail that 16-bit floats have', () => {
    const f16 = (values: readonly number[]) => castData(Float64Array.from(values), 'float64', 'float16')
    for (const values of [torch.f16_15, torch.f16_17]) {
      const actual = seeded(42).randn([values.length], { dtype: 'float16' })
      expect(differingElements(actual.data, f16(values))).toBe(0)
    }
  })

  it('can fail: JavaScript`s own log, sin and cos differ in the last bit', () => {
    const expected = golden('seed42.f32.n4096').data
    const data = seeded(42).rand([4096]).data
    for (let i = 0; i < 4096; i += 16) {
      for (let j = i; j < i + 8; j++) {
        const radius = Math.fround(Math.sqrt(-2 * Math.log(1 - (data[j] as number))))
        const angle = Math.fround(2 * Math.PI * (data[j + 8] as number))
        data[j] = radius * Math.cos(angle)
        data[j + 8] = radius * Math.sin(angle)
      }
    }
    expect(differingElements(data, expected)).toBeGreaterThan(400)
    expect(differingElements(seeded(43).randn([4096]).data, expected)).toBeGreaterThan(4000)
  })

  it('gives positive zeros for the uniform 0, as adding the mean does', () => {
    const data = new Float32Array(16)
    boxMuller16(data, 0)
    expect(data.every((value) => Object.is(value, 0))).toBe(true)
  })

  it('never gives a negative zero, a NaN or an infinity', () => {
    fc.assert(
      fc.property(fc.integer({ min: 0, max: 2 ** 32 - 1 }), fc.integer({ min: 0, max: 70 }), (seed, size) => {
        const { data } = seeded(seed).randn([size])
        return data.length === size && data.every((value) => Number.isFinite(value) && !Object.is(value, -0))
      }),
    )
  })

  it('refuses dtypes and shapes that torch refuses', async () => {
    const dtype = 'int32' as DType as RandnDType
    expect(await codeOf(() => seeded(1).randn([2], { dtype }))).toBe('GENERATOR_DTYPE')
    expect(await codeOf(() => seeded(1).randn([16], { dtype }))).toBe('GENERATOR_DTYPE')
    expect(await codeOf(() => seeded(1).rand([2], { dtype: dtype as 'float32' }))).toBe('GENERATOR_DTYPE')
    expect(await codeOf(() => seeded(1).randn([-1]))).toBe('GENERATOR_SHAPE')
    expect(await codeOf(() => seeded(1).randn([2.5]))).toBe('GENERATOR_SHAPE')
  })
})

describe('rand', () => {
  it.each([...SEEDS, '18446744073709551615'])('gives the uniforms of torch for seed %s', (seed) => {
    expect([...seeded(BigInt(seed)).rand([8]).data]).toEqual(rng.uniform24[seed])
  })

  it('has 53 bits in float64', () => {
    expect([...seeded(42).rand([3], { dtype: 'float64' }).data]).toEqual(torch.rand64)
  })
})

describe('seeds', () => {
  it('count modulo 2^32 and are remembered whole', () => {
    const large = seeded(2n ** 32n + 5n)
    expect(large.initialSeed()).toBe(4294967301n)
    expect([...large.randn([20]).data]).toEqual([...seeded(5).randn([20]).data])
  })

  it('are wrapped when negative, as torch does', () => {
    expect(seeded(-5).initialSeed()).toBe(18446744073709551611n)
    expect([...seeded(-5).randn([16]).data]).toEqual(torch.neg5)
  })

  it('have a default', () => {
    const generator = new Generator()
    expect(generator.initialSeed()).toBe(67280421310721n)
    expect([...generator.randn([4]).data]).toEqual(torch.default)
  })

  it('drop the spare of the former sequence', () => {
    const generator = seeded(42)
    generator.randn([3])
    expect([...generator.manualSeed(42).randn([3]).data]).toEqual([...seeded(42).randn([3]).data])
  })

  it('are drawn with 53 bits and start the sequence that they name', () => {
    const generator = new Generator()
    const seed = generator.seed()
    expect(seed).toBeLessThan(2n ** 53n)
    expect(seed).not.toBe(generator.seed())
    expect(generator.manualSeed(seed).initialSeed()).toBe(seed)
  })

  it.each([0.5, Number.NaN, Number.POSITIVE_INFINITY, 2 ** 53, 2n ** 64n, -(2n ** 63n) - 1n])(
    'refuses %s',
    async (seed) => {
      expect(await codeOf(() => seeded(seed))).toBe('GENERATOR_SEED')
    },
  )
})

describe('randnTensor', () => {
  const shape = [2, 128, 2, 3]

  it('draws each sample of a batch from its own generator', () => {
    const expected = golden('seed7.f32.batch2_list')
    const actual = randnTensor(shape, [seeded(7), seeded(8)])
    expect(actual.shape).toEqual(expected.shape)
    expect(differingElements(actual.data, expected.data)).toBe(0)
    expect(differingElements(randnTensor(shape, [seeded(8), seeded(7)]).data, expected.data)).toBeGreaterThan(1000)
  })

  it('draws the whole batch from one generator, alone or in a list', () => {
    const expected = [...seeded(7).randn(shape, { dtype: 'bfloat16' }).data]
    expect([...randnTensor(shape, seeded(7), { dtype: 'bfloat16' }).data]).toEqual(expected)
    expect([...randnTensor(shape, [seeded(7)], { dtype: 'bfloat16' }).data]).toEqual(expected)
    expect(expected).toHaveLength(sizeOf(shape))
  })

  it('refuses another number of generators than samples', async () => {
    expect(await codeOf(() => randnTensor(shape, []))).toBe('GENERATOR_BATCH')
    expect(await codeOf(() => randnTensor(shape, [seeded(1), seeded(2), seeded(3)]))).toBe('GENERATOR_BATCH')
  })
})

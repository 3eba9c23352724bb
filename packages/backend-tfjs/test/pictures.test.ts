import { expectClose } from '@rankwise/conformance/compare'
import { onRanks } from '@rankwise/conformance/ranks'
import { loadGolden } from '@rankwise/fixtures'
import { beforeAll, describe, expect, it } from 'vitest'
import { hasNative } from './engines.ts'
import type { RankRequest, RankResult } from './workers/pictures.ts'

const WORKER = new URL('workers/pictures.ts', import.meta.url)
/** A third of the steps that the demo takes: a picture all the same, and WebAssembly takes 0.7 s for each. */
const PICTURE = { prompt: 'a cat on a blue background', steps: 4 }
/** Ranks that share cores with other suites take their time. */
const PATIENCE = 240_000
const TRANSFORMERS = [
  { checkpoint: 'flux2-klein-tiny', golden: 'transformer/flux2-klein-tiny.a.f32.safetensors' },
  { checkpoint: 'flux2-tiny', golden: 'transformer/flux2-tiny.b.f32.safetensors' },
  { checkpoint: 'flux2-tiny-bf16', golden: 'transformer/flux2-tiny-bf16.a.f32.safetensors' },
]
const RUNS = [
  ...[1, 2].map((worldSize) => ({ engine: 'wasm' as const, worldSize })),
  ...(hasNative ? [1, 2, 4].map((worldSize) => ({ engine: 'native' as const, worldSize })) : []),
]

function run(worldSize: number, request: RankRequest): Promise<readonly RankResult[]> {
  return onRanks(worldSize, WORKER, request)
}

/** At most 1 level apart, in at most 0.5 % of the bytes. */
function expectSamePicture(actual: Uint8Array, expected: Uint8Array): void {
  expect(actual).toHaveLength(expected.length)
  const apart = Array.from(actual, (value, i) => Math.abs(value - (expected[i] as number)))
  expect(Math.max(...apart)).toBeLessThanOrEqual(1)
  expect(apart.filter((distance) => distance > 0).length / apart.length).toBeLessThanOrEqual(0.005)
}

let expected: Uint8Array
beforeAll(async () => {
  const [rank] = await run(1, { backend: 'ort', transformers: [], ...PICTURE })
  expected = (rank as RankResult).image
}, PATIENCE)

describe.each(RUNS)('on $engine at degree $worldSize', ({ engine, worldSize }) => {
  let ranks: readonly RankResult[]
  beforeAll(async () => {
    ranks = await run(worldSize, { backend: engine, transformers: TRANSFORMERS, ...PICTURE })
  }, PATIENCE)

  it('draws the picture that backend-ort draws', () => {
    expectSamePicture((ranks[0] as RankResult).image, expected)
  })

  it.each(TRANSFORMERS.map((transformer, i) => ({ ...transformer, i })))(
    '$checkpoint agrees with diffusers',
    async ({ golden, i }) => {
      const output = (await loadGolden(golden)).get('out')
      expectClose(ranks[0]?.outputs[i] as Float32Array, output, { relativeRms: 2e-5 })
    },
  )

  it('is bitwise the same on all ranks', () => {
    expect(ranks).toHaveLength(worldSize)
    for (const { image, outputs } of ranks)
      expect({ image, outputs }).toEqual({ image: ranks[0]?.image, outputs: ranks[0]?.outputs })
  })

  it('leaves nothing behind', () => {
    for (const { left } of ranks) expect(left).toEqual({ weightBytes: 0, executables: 0 })
  })
})

it('the picture check notices 2 levels, and 1 level in 1 % of the bytes', () => {
  const picture = new Uint8Array(4000).fill(100)
  const brighter = (step: number, by: number) => picture.map((value, i) => (i % step === 0 ? value + by : value))
  expectSamePicture(brighter(1000, 1), picture)
  expect(() => expectSamePicture(brighter(4000, 2), picture)).toThrow()
  expect(() => expectSamePicture(brighter(100, 1), picture)).toThrow()
})

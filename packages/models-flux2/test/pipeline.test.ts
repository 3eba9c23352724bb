import { readFile } from 'node:fs/promises'
import { Checkpoint, readConfig, readSafetensors, resolvePlan } from '@rankwise/core'
import { Image } from '@rankwise/diffusion'
import { bfloat16Spread, expectClose, GoldenTensors, onRanks, referencePath } from '@rankwise/fixtures'
import { beforeAll, describe, expect, it } from 'vitest'
import { Flux2Transformer2DModel, flux2Plan } from '../src/index.ts'
import { expectRoundedSteps, expectWithinSpread, tensorOf } from './golden-bfloat16.ts'
import { expectSameLatents } from './golden-latents.ts'
import { PIPELINE_CASES, type PipelineCase, WIDE_CASES } from './pipeline-cases.ts'
import type { PipelineResult } from './workers/pipeline.ts'

const WORKER = new URL('workers/pipeline.ts', import.meta.url)
/** A dozen runs of real processes: 10 s on two idle cores, over a minute on busy ones. */
const RUNS_TIMEOUT_MS = 300_000

/** At most as many levels apart as pictures of diffusers in bfloat16 are. */
async function expectSimilarPicture(actual: Uint8Array, expected: Uint8Array): Promise<void> {
  const { absolute } = await bfloat16Spread('image')
  expectClose([...actual], [...expected], { absolute: Math.round(255 * absolute) })
}

/** At most 1 level apart, in at most 0.1 % of the bytes. */
function expectSamePicture(actual: Uint8Array, expected: Uint8Array): void {
  expect(actual).toHaveLength(expected.length)
  const apart = Array.from(actual, (value, i) => Math.abs(value - (expected[i] as number)))
  expect(Math.max(...apart)).toBeLessThanOrEqual(1)
  expect(apart.filter((distance) => distance > 0).length / apart.length).toBeLessThanOrEqual(0.001)
}

function bytesOf({ latents, image }: PipelineResult): Buffer {
  return Buffer.concat(
    [image, ...latents.map(({ data }) => data)].map(({ buffer, byteOffset, byteLength }) =>
      Buffer.from(buffer, byteOffset, byteLength),
    ),
  )
}

describe.each<[number, readonly PipelineCase[]]>([
  [1, PIPELINE_CASES],
  [2, PIPELINE_CASES],
  [4, WIDE_CASES],
])('at degree %i', (worldSize, cases) => {
  let ranks: readonly (readonly PipelineResult[])[]

  beforeAll(async () => {
    ranks = await onRanks(worldSize, WORKER, cases)
  }, RUNS_TIMEOUT_MS)

  it.each(cases.map((testCase, index) => ({ ...testCase, index })))('$name agrees with diffusers', async (testCase) => {
    const result = ranks[0]?.[testCase.index] as PipelineResult
    const golden = new GoldenTensors(await readSafetensors(`${testCase.golden}.safetensors`))
    const picture = Image.fromPng(await readFile(`${testCase.golden}.png`)).data
    if (testCase.dtype === 'bfloat16') {
      await expectWithinSpread(result, golden)
      expectRoundedSteps(result, golden, golden.get('latents.0'))
      await expectSimilarPicture(result.image, picture)
    } else {
      expectSameLatents(result.latents.map(tensorOf), golden)
      expectSamePicture(result.image, picture)
    }
  })

  it('is bitwise the same on all ranks', () => {
    expect(ranks).toHaveLength(worldSize)
    for (const rank of ranks) {
      for (const [i, result] of rank.entries()) {
        // Of bytes: comparing the elements one by one took 8 s.
        expect(bytesOf(result).equals(bytesOf(ranks[0]?.[i] as PipelineResult)), cases[i]?.name).toBe(true)
      }
    }
  })

  it('never had a buffer larger than its share of a weight that is split', async () => {
    const directory = referencePath('flux2-klein-tiny', 'transformer')
    const model = Flux2Transformer2DModel.fromConfig(await readConfig(directory))
    const split = [...resolvePlan(model, flux2Plan)].filter(([, { placement }]) => placement.kind === 'shard')
    await using checkpoint = await Checkpoint.open(directory)
    for (const rank of ranks) {
      if (worldSize > 1) expect(rank[0]?.largestBuffers.size, 'rows are gathered').toBeGreaterThan(0)
      for (const [name] of split) {
        // A shard that is mapped takes no buffer.
        const buffer = rank[0]?.largestBuffers.get(name) ?? 0
        expect(buffer, name).toBeLessThanOrEqual((checkpoint.tensors.get(name)?.byteLength ?? 0) / worldSize)
      }
    }
  })
})

it('the picture check notices 2 levels, and 1 level in 0.2 % of the bytes', () => {
  const picture = new Uint8Array(4000).fill(100)
  const brighter = (step: number, by: number) => picture.map((value, i) => (i % step === 0 ? value + by : value))
  expectSamePicture(brighter(1000, 1), picture)
  expect(() => expectSamePicture(brighter(4000, 2), picture)).toThrow()
  expect(() => expectSamePicture(brighter(500, 1), picture)).toThrow()
})

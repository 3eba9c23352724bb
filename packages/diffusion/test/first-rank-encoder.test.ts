import { ort } from '@rankwise/backend-ort'
import { expectClose, onRanks, referencePath } from '@rankwise/fixtures'
import { expect, it } from 'vitest'
import { FirstRankTextEncoder } from '../src/first-rank-text-encoder.ts'
import { Qwen3ForCausalLM } from '../src/qwen3.ts'
import { codeOf, goldenTensors } from './support.ts'
import { padded, textGoldens } from './text-goldens.ts'
import type { FirstRankResult } from './workers/first-rank-encoder.ts'

const WORKER = new URL('workers/first-rank-encoder.ts', import.meta.url)
const FOLDER = referencePath('flux2-klein-tiny', 'text_encoder')

it('encodes on rank 0 for all ranks, and the group survives what fails', async () => {
  const ranks = await onRanks<FirstRankResult>(2, WORKER, undefined)
  const golden = (await goldenTensors('text', 'flux2-klein-tiny.safetensors'))('len128.prompt_embeds')
  for (const { embeds, together, after } of ranks) {
    expectClose(embeds, golden.data as Float32Array, { relativeRms: 2e-5 })
    expect(after).toEqual(embeds)
    expect(embeds).toEqual(ranks[0]?.embeds)
    expect(together.map(({ length }) => length)).toEqual([8 * 32, 8 * 64])
    expect(together).toEqual(ranks[0]?.together)
  }
  expect(ranks.map(({ failures }) => failures)).toEqual([
    ['TOKEN_ID', 'ENCODE_FAILED_ELSEWHERE', 'ENCODE_FAILED_ELSEWHERE', 'CONFIG_NOT_FOUND'],
    ['ENCODE_FAILED_ELSEWHERE', 'TEXTS_DIFFER', 'ABORTED', 'LOAD_FAILED_ELSEWHERE'],
  ])
  const [first, second] = ranks.map(({ weightBytes }) => weightBytes)
  expect(first?.[0]).toBeGreaterThan(1e6)
  expect(first?.[1]).toBe(0)
  expect(second).toEqual([0, 0])
})

it('is the encoder itself for a rank that is alone', async () => {
  await using backend = await ort({ device: 'cpu' })
  const load = (signal: AbortSignal) => Qwen3ForCausalLM.fromPretrained(FOLDER, { backend, signal })
  await using encoder = await FirstRankTextEncoder.create(load)
  await using plain = await load(new AbortController().signal)
  const { inputs } = await textGoldens('flux2-klein-tiny', '').prompts(128)
  expect(await encoder.encode(inputs)).toEqual(await plain.encode(inputs))
  const short = padded([[1]], 4, { side: 'right', padTokenId: 1000 })
  expect(await codeOf(() => encoder.encode(short, { outLayers: [99] }))).toBe('OUT_LAYERS')
  expect(await codeOf(() => encoder.encode(short, { signal: AbortSignal.abort() }))).toBe('ABORTED')
})

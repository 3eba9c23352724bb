import { defineModelConformance } from '@rankwise/conformance'
import type { ModelClass } from '@rankwise/core'
import { expectClose, onRanks, referencePath } from '@rankwise/fixtures'
import { describe, expect, it } from 'vitest'
import type { DecoderTextEncoder } from '../src/decoder-text-encoder.ts'
import { Mistral3ForConditionalGeneration } from '../src/mistral3.ts'
import { Qwen3ForCausalLM } from '../src/qwen3.ts'
import { goldenTensors } from './support.ts'
import type { EncoderPipeline, SplitEncoderResult } from './workers/text-encoder.ts'

const WORKER = new URL('workers/text-encoder.ts', import.meta.url)

const ENCODERS: readonly {
  readonly pipeline: EncoderPipeline
  readonly model: ModelClass<DecoderTextEncoder>
  readonly depth: number
}[] = [
  { pipeline: 'flux2-klein-tiny', model: Qwen3ForCausalLM, depth: 27 },
  { pipeline: 'flux2-tiny', model: Mistral3ForConditionalGeneration, depth: 30 },
]

const runs = new Map<string, Promise<readonly SplitEncoderResult[]>>()

/** All ranks' results; one run serves all tests of a degree. */
function encodersOn(worldSize: number, pipeline: EncoderPipeline): Promise<readonly SplitEncoderResult[]> {
  const key = `${pipeline} ${worldSize}`
  const running = runs.get(key) ?? onRanks<SplitEncoderResult>(worldSize, WORKER, pipeline)
  runs.set(key, running)
  return running
}

describe.each(ENCODERS)('the text encoder of $pipeline', ({ pipeline, model, depth }) => {
  defineModelConformance({
    model,
    checkpoints: [{ name: pipeline, directory: referencePath(pipeline, 'text_encoder') }],
    goldens: [
      {
        name: 'of the prompts',
        outputs: async () => ({
          promptEmbeds: (await goldenTensors('text', `${pipeline}.safetensors`))('len128.prompt_embeds'),
        }),
      },
    ],
    run: async (worldSize) => {
      const ranks = await encodersOn(worldSize, pipeline)
      return ranks.map(({ embeds }) => [{ promptEmbeds: embeds }])
    },
    // Of the embedding, and two of every layer.
    exchanges: 1 + 2 * depth,
  })

  describe.each([2, 4])('at degree %i', (worldSize) => {
    it('gives what it gives on one rank, loaded split or split in memory', async () => {
      const [whole] = await encodersOn(1, pipeline)
      for (const { embeds, split } of await encodersOn(worldSize, pipeline)) {
        expectClose(embeds, whole?.embeds as Float32Array, { relativeRms: 2e-5 })
        expect(split).toEqual(embeds)
      }
    })

    it('has its share of the weights on every rank, the table of embeddings included', async () => {
      for (const { reports } of await encodersOn(worldSize, pipeline)) {
        const [{ localBytes, fullBytes, readBytes, mappedBytes }, split] = reports
        expect(localBytes / fullBytes).toBeLessThan(worldSize === 2 ? 0.55 : 0.3)
        // Two heads of keys and values are shared by four ranks.
        expect(localBytes / fullBytes).toBeGreaterThan(1 / worldSize)
        expect(readBytes + mappedBytes).toBeLessThanOrEqual(1.02 * localBytes)
        expect(split.localBytes).toBe(localBytes)
      }
    })
  })
})

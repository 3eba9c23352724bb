import { type DType, Tensor } from '@rankwise/core'
import { roundingOf } from '@rankwise/diffusion'
import { bfloat16Spread, expectClose, type GoldenTensors } from '@rankwise/fixtures'
import { expect } from 'vitest'
import type { PipelineResult, SentTensor } from './workers/pipeline.ts'

const round = roundingOf('bfloat16')

/** What of a run is compared with diffusers. */
export type Run = Pick<PipelineResult, 'latents' | 'forwards'>

/**
 * A run in bfloat16 is as near to that of diffusers as diffusers is to itself: prompt embeddings, every prediction and the
 * latents after every step. Noise levels are the same bits.
 */
export async function expectWithinSpread({ latents, forwards }: Run, golden: GoldenTensors): Promise<void> {
  expect(forwards).toHaveLength(4)
  expect(latents).toHaveLength(4)
  for (const { promptEmbeds } of forwards) await expectSpread(promptEmbeds, golden, 'prompt_embeds')
  const levels = forwards.flatMap(({ timestep }) => [...tensorOf(timestep).cast('float32').data])
  expect(levels).toEqual([...golden.get('model_timestep').cast('float32').data])
  for (const [step, { sample }] of forwards.entries()) {
    await expectSpread(sample, golden, `noise_pred.${step}`)
    await expectSpread(latents[step] as SentTensor, golden, `latents.${step + 1}`)
  }
}

async function expectSpread(actual: SentTensor, golden: GoldenTensors, name: string): Promise<void> {
  expect(actual.dtype satisfies DType, name).toBe('bfloat16')
  const expected = golden.get(name)
  // Where diffusers was nearest to itself by chance, another CPU need not be.
  const steps = name.startsWith('noise_pred') ? [0, 1, 2, 3].map((step) => `noise_pred.${step}`) : [name]
  const spreads = await Promise.all(steps.map(bfloat16Spread))
  expectClose(tensorOf(actual), expected, { absolute: Math.max(...spreads.map(({ absolute }) => absolute)) })
}

/** Every step goes from one tensor of bfloat16 to the next, by the arithmetic of torch on a CPU, bit by bit. */
export function expectRoundedSteps({ latents, forwards }: Run, golden: GoldenTensors, noise: SentTensor): void {
  const sigmas = golden.get('sigmas').data as Float32Array
  let before = values(noise)
  for (const [step, { sample }] of forwards.entries()) {
    const dt = round(Math.fround((sigmas[step + 1] as number) - (sigmas[step] as number)))
    const velocity = values(sample)
    const expected = before.map((x, i) => round(x + round(dt * (velocity[i] as number))))
    before = values(latents[step] as SentTensor)
    expect(before, `step ${step}`).toEqual(expected)
  }
}

export function tensorOf({ dtype, shape, data }: SentTensor): Tensor {
  return new Tensor(dtype, shape, data as never)
}

function values(tensor: SentTensor): Float32Array {
  return tensorOf(tensor).cast('float32').data
}

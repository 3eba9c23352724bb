import { ort } from '@rankwise/backend-ort'
import { type Backend, itemSize, type Node, Tensor } from '@rankwise/core'
import { bfloat16Spread, expectClose, referencePath } from '@rankwise/fixtures'
import { describe, expect, it } from 'vitest'
import { AutoencoderKLFlux2 } from '../src/autoencoder-kl-flux2.ts'
import { Mistral3ForConditionalGeneration } from '../src/mistral3.ts'
import { MutantBackend, type Mutation } from './mutant-backend.ts'
import { goldenTensors } from './support.ts'
import { textGoldens } from './text-goldens.ts'

const PIPELINE = referencePath('flux2-tiny')
const dtype = 'bfloat16'

/** Leaves the results of an operation as they are, as if it were one operation with the next. */
const unrounded = (op: string): Mutation => ({
  node: (node: Node) =>
    node.op === op && node.outputs.every((output) => itemSize(output.dtype) === 2)
      ? { ...node, outputs: node.outputs.map((output) => ({ ...output, dtype: 'float32' })) }
      : node,
})

describe('the text encoder', () => {
  /** Whether prompt embeddings are within what torch differs from itself. */
  async function check(backend: Backend): Promise<void> {
    const { inputs } = await textGoldens('flux2-tiny', 'len128').prompts(128)
    const golden = await goldenTensors('pipeline', 'dev.t2i.64x96.bf16.safetensors')
    const first = { inputIds: firstRow(inputs.inputIds), attentionMask: firstRow(inputs.attentionMask) }
    await using encoder = await Mistral3ForConditionalGeneration.fromPretrained(PIPELINE, {
      subfolder: 'text_encoder',
      backend,
      dtype,
    })
    const embeds = await encoder.encode(first)
    expect(embeds.dtype).toBe(dtype)
    expectClose(embeds, golden('prompt_embeds'), await bfloat16Spread('prompt_embeds'))
  }

  it('rounds where transformers does', async () => {
    await using backend = await ort({ device: 'cpu', threads: 1 })
    await check(backend)
  })

  it.each(['rms_norm', 'mul'])('does not, where the results of %s stay as they are', async (op) => {
    await expect(check(new MutantBackend(unrounded(op)))).rejects.toThrow('relative RMS')
  })
})

/** The first of the prompts, which is that of the pipeline. */
function firstRow({ shape: [, tokens], data }: Tensor<'int32'>): Tensor<'int32'> {
  return Tensor.int32([1, tokens as number], data.slice(0, tokens))
}

describe('the VAE', () => {
  it('decodes latents, and has the statistics of diffusers bit by bit', async () => {
    const golden = await goldenTensors('vae', 'flux2-tiny.bf16.safetensors')
    await using backend = await ort({ device: 'cpu', threads: 1 })
    await using vae = await AutoencoderKLFlux2.fromPretrained(PIPELINE, { subfolder: 'vae', backend, dtype })
    const { mean, std } = await vae.latentStatistics(dtype)
    expect(mean).toEqual(golden('bn.mean'))
    expect(std).toEqual(golden('bn.std'))
    const image = await vae.decode(golden('dec.unpatchified'))
    expect(image.dtype).toBe(dtype)
    expectClose(image, golden('dec.image'), await bfloat16Spread('vae'))
  })
})

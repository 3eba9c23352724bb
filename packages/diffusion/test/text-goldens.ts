import { Tensor } from '@rankwise/core'
import type { TextEncoderInputs } from '../src/decoder-text-encoder.ts'
import { goldenJson, goldenTensors } from './support.ts'

interface TextGolden {
  readonly padding_side: Padding['side']
  readonly pad_token_id: number
  readonly prompt_embeds_rows: Readonly<Record<string, readonly number[]>>
  readonly cases: Readonly<Record<string, { readonly token_ids_unpadded: readonly (readonly number[])[] }>>
}

interface Padding {
  readonly side: 'left' | 'right'
  readonly padTokenId: number
}

/** Token ids padded as a pipeline pads them. */
export function padded(
  rows: readonly (readonly number[])[],
  length: number,
  { side, padTokenId }: Padding,
): TextEncoderInputs {
  const inputIds = Tensor.int32([rows.length, length], new Int32Array(rows.length * length).fill(padTokenId))
  const attentionMask = Tensor.zeros('int32', inputIds.shape)
  for (const [i, ids] of rows.entries()) {
    const start = i * length + (side === 'left' ? length - ids.length : 0)
    inputIds.data.set(ids, start)
    attentionMask.data.fill(1, start, start + ids.length)
  }
  return { inputIds, attentionMask }
}

/**
 * What transformers made of a pipeline's prompts.
 *
 * @param traced - prefix of the prompt of which all hidden states are known
 */
export function textGoldens(pipeline: string, traced: string) {
  const tensors = () => goldenTensors('text', `${pipeline}.safetensors`)
  return {
    /** Prompts at a length and their embeddings. */
    async prompts(length: number): Promise<{ readonly inputs: TextEncoderInputs; readonly embeds: Tensor }> {
      const golden = await goldenJson<TextGolden>('text', `${pipeline}.json`)
      const rows = golden.prompt_embeds_rows[length]?.map((row) => golden.cases[length]?.token_ids_unpadded[row] ?? [])
      const padding = { side: golden.padding_side, padTokenId: golden.pad_token_id }
      return { inputs: padded(rows ?? [], length, padding), embeds: (await tensors())(`len${length}.prompt_embeds`) }
    },

    async inputs(): Promise<TextEncoderInputs> {
      const golden = await tensors()
      return {
        inputIds: golden(`${traced}.input_ids`).cast('int32'),
        attentionMask: golden(`${traced}.attention_mask`).cast('int32'),
      }
    },

    /** Hidden states side by side, in the layout of prompt embeddings. */
    async states(layers: readonly number[]): Promise<Tensor> {
      const states = (await tensors())(`${traced}.hidden_states`)
      const [, , tokens, width] = states.shape as readonly [number, number, number, number]
      const result = Tensor.zeros('float32', [1, tokens, layers.length * width])
      for (let token = 0; token < tokens; token++) {
        for (const [i, k] of layers.entries()) {
          const from = (k * tokens + token) * width
          const state = (states.data as Float32Array).subarray(from, from + width)
          result.data.set(state, (token * layers.length + i) * width)
        }
      }
      return result
    },
  }
}

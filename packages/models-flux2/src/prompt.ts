import { RankwiseError, Tensor } from '@rankwise/core'
import { prepareTextIds, type Qwen3ForCausalLM, type Tokenizer } from '@rankwise/diffusion'
import { float32 } from './output.ts'

/** What the transformer is conditioned on. */
export interface Prompt {
  /** float32 `[batch, textTokens, jointAttentionDim]` */
  readonly embeds: Tensor<'float32'>
  /** int32 `[textTokens, 4]` */
  readonly ids: Tensor<'int32'>
}

export interface EncodePromptOptions {
  readonly maxSequenceLength: number
  readonly textEncoderOutLayers: readonly number[]
  readonly numImagesPerPrompt: number
  readonly signal?: AbortSignal | undefined
}

/**
 * Embeds prompts with Qwen3, each `numImagesPerPrompt` times in a row. A prompt becomes a chat turn whose thinking block
 * is closed at once, padded on the right; the outputs of several layers lie side by side in every token.
 */
export async function encodePrompt(
  prompts: readonly string[],
  { tokenizer, textEncoder }: { readonly tokenizer: Tokenizer; readonly textEncoder: Pick<Qwen3ForCausalLM, 'encode'> },
  options: EncodePromptOptions,
): Promise<Prompt> {
  const { maxSequenceLength, textEncoderOutLayers, numImagesPerPrompt, signal } = options
  const encoded = prompts.map((content) => {
    const text = tokenizer.applyChatTemplate([{ role: 'user', content }], {
      addGenerationPrompt: true,
      enableThinking: false,
    })
    return tokenizer.encode(text, { maxLength: maxSequenceLength, padding: 'max_length' })
  })
  const batch = (rows: readonly Int32Array[]) =>
    Tensor.int32([rows.length, maxSequenceLength], Int32Array.from(rows.flatMap((row) => [...row])))
  const embeds = await textEncoder.encode(
    {
      inputIds: batch(encoded.map(({ inputIds }) => inputIds)),
      attentionMask: batch(encoded.map(({ attentionMask }) => attentionMask)),
    },
    { outLayers: textEncoderOutLayers, signal },
  )
  return promptFromEmbeds(embeds, embeds.shape.at(-1) as number, numImagesPerPrompt)
}

/**
 * A prompt that is embedded already, every one `numImagesPerPrompt` times in a row.
 *
 * @param embeds - float32 `[prompts, textTokens, jointAttentionDim]`
 * @param width - jointAttentionDim of the transformer
 * @throws RankwiseError `PROMPT_EMBEDS_SHAPE`
 */
export function promptFromEmbeds(embeds: Tensor, width: number, numImagesPerPrompt: number): Prompt {
  const [prompts, tokens] = embeds.shape
  if (prompts === undefined || tokens === undefined || embeds.shape[2] !== width || embeds.shape.length !== 3) {
    throw new RankwiseError('PROMPT_EMBEDS_SHAPE', 'the prompt embeddings do not fit the transformer', {
      actual: { shape: embeds.shape, jointAttentionDim: width },
      rule: 'prompt embeddings are [prompts, textTokens, jointAttentionDim]',
    })
  }
  const { data } = float32(embeds)
  const repeated = new Float32Array(data.length * numImagesPerPrompt)
  const size = tokens * width
  for (let row = 0; row < prompts * numImagesPerPrompt; row++) {
    const prompt = Math.floor(row / numImagesPerPrompt)
    repeated.set(data.subarray(prompt * size, (prompt + 1) * size), row * size)
  }
  return {
    embeds: Tensor.float32([prompts * numImagesPerPrompt, tokens, width], repeated),
    ids: prepareTextIds(tokens),
  }
}

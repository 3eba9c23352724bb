import { RankwiseError, Tensor } from '@rankwise/core'
import { type HiddenStateEncoder, prepareTextIds, type TokenizedText, type Tokenizer } from '@rankwise/diffusion'
import { gather, type LatentTensor, latentTensor } from './latent-tensor.ts'

/** What the transformer is conditioned on. */
export interface Prompt {
  /** `[batch, textTokens, jointAttentionDim]` */
  readonly embeds: LatentTensor
  /** int32 `[textTokens, 4]` */
  readonly ids: Tensor<'int32'>
}

/** What embeds a prompt. */
export interface PromptEncoder {
  readonly tokenizer: Tokenizer
  readonly textEncoder: Pick<HiddenStateEncoder, 'encode'>
}

export interface EncodePromptOptions {
  /** Tokens that a prompt is padded or truncated to. */
  readonly maxSequenceLength: number
  readonly textEncoderOutLayers: readonly number[]
  readonly numImagesPerPrompt: number
  /** Whether to warn of prompts that are truncated: of several ranks, one does. @default true */
  readonly warns?: boolean
  readonly signal?: AbortSignal | undefined
}

/**
 * Embeds prompts, each `numImagesPerPrompt` times in a row; the outputs of several layers lie side by side in every
 * token. Warns with `PROMPT_TRUNCATED`, once, of all that is truncated.
 *
 * @param tokenize - the ids of a prompt at a length, as the model was trained on them
 */
export async function embedPrompts(
  prompts: readonly string[],
  { tokenizer, textEncoder }: PromptEncoder,
  tokenize: (tokenizer: Tokenizer, prompt: string, maxLength: number) => TokenizedText,
  options: EncodePromptOptions,
): Promise<Prompt> {
  const { maxSequenceLength, textEncoderOutLayers, numImagesPerPrompt, warns = true, signal } = options
  const encoded = prompts.map((prompt) => tokenize(tokenizer, prompt, maxSequenceLength))
  if (warns) warnTruncated(tokenizer, encoded, maxSequenceLength)
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

/** What the model does not see of the prompts, each part once. */
function warnTruncated(tokenizer: Tokenizer, encoded: readonly TokenizedText[], maxSequenceLength: number): void {
  const parts = encoded
    .filter(({ overflowingTokens }) => overflowingTokens.length > 0)
    .map(({ overflowingTokens }) => `${overflowingTokens.length} tokens '${tokenizer.decode(overflowingTokens)}'`)
  if (parts.length === 0) return
  process.emitWarning(
    `the prompt is longer than maxSequenceLength ${maxSequenceLength}; cut off: ${[...new Set(parts)].join(', ')}`,
    { code: 'PROMPT_TRUNCATED' },
  )
}

/**
 * A prompt that is embedded already, every one `numImagesPerPrompt` times in a row.
 *
 * @param embeds - `[prompts, textTokens, jointAttentionDim]`
 * @param width - jointAttentionDim of the transformer
 * @throws RankwiseError `PROMPT_EMBEDS_SHAPE`, `DTYPE_UNSUPPORTED`
 */
export function promptFromEmbeds(embeds: Tensor, width: number, numImagesPerPrompt: number): Prompt {
  const [prompts, tokens] = embeds.shape
  if (prompts === undefined || tokens === undefined || embeds.shape[2] !== width || embeds.shape.length !== 3) {
    throw new RankwiseError('PROMPT_EMBEDS_SHAPE', 'the prompt embeddings do not fit the transformer', {
      actual: { shape: embeds.shape, jointAttentionDim: width },
      rule: 'prompt embeddings are [prompts, textTokens, jointAttentionDim]',
    })
  }
  const source = latentTensor(embeds, 'promptEmbeds')
  const size = tokens * width
  const batch = prompts * numImagesPerPrompt
  const rows = Array.from(
    { length: batch },
    (_, row) => [source, Math.floor(row / numImagesPerPrompt) * size, size] as const,
  )
  return { embeds: gather(source.dtype, [batch, tokens, width], rows), ids: prepareTextIds(tokens) }
}

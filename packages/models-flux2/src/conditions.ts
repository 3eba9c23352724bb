import { type Collectives, RankwiseError } from '@rankwise/core'
import type { LatentDType } from '@rankwise/diffusion'
import { type Prompt, promptFromEmbeds } from './prompt.ts'
import type { ReferenceTokens } from './reference-tokens.ts'
import type { Request } from './request.ts'

/** What a denoising is pulled to and, with guidance, away from. */
export interface Conditions {
  readonly prompt: Prompt
  readonly negative: Prompt | undefined
  readonly references: ReferenceTokens | undefined
}

/** How the prompts of a call are embedded. */
export interface EncodePromptsOptions {
  /** Embeds prompts, each as often as pictures are drawn from it. */
  readonly encode: (prompts: readonly string[]) => Promise<Prompt>
  /** jointAttentionDim of the transformer. */
  readonly width: number
  /** Of the transformer, whatever the text encoder computes in. */
  readonly dtype: LatentDType
  /** Whether the empty prompt is needed as well. */
  readonly isGuided: boolean
}

/**
 * Embeds the prompt of a call and, where guidance needs it, the empty one.
 *
 * @throws RankwiseError `PROMPT_EMBEDS_SHAPE`, and those of the text encoder
 */
export async function encodePrompts(
  { prompts = [], promptEmbeds, negativePromptEmbeds, batch, numImagesPerPrompt }: Request,
  { encode, width, dtype, isGuided }: EncodePromptsOptions,
): Promise<Pick<Conditions, 'prompt' | 'negative'>> {
  const embed = async (texts: readonly string[], given: Request['promptEmbeds']): Promise<Prompt> => {
    const { embeds, ids } =
      given === undefined ? await encode(texts) : promptFromEmbeds(given, width, numImagesPerPrompt)
    return { embeds: embeds.cast(dtype), ids }
  }
  const prompt = await embed(prompts, promptEmbeds)
  if (!isGuided) return { prompt, negative: undefined }
  const empty = new Array<string>(batch / numImagesPerPrompt).fill('')
  const negative = await embed(empty, negativePromptEmbeds)
  requireBatch(negative, batch)
  return { prompt, negative }
}

function requireBatch({ embeds }: Prompt, batch: number): void {
  if (embeds.shape[0] === batch) return
  throw new RankwiseError('PROMPT_EMBEDS_SHAPE', 'there are not as many negative embeddings as prompts', {
    where: 'negativePromptEmbeds',
    actual: { negative: embeds.shape[0], pictures: batch },
    rule: 'negativePromptEmbeds has an entry for every prompt',
  })
}

/**
 * Gives every rank the conditions of rank 0. Each rank computes its own, and ranks with other CPUs or threads round
 * differently; from different conditions, the ranks would denoise slightly different pictures into each other.
 */
export async function shareConditions(
  { prompt, negative, references }: Conditions,
  collectives: Collectives | undefined,
  signal: AbortSignal | undefined,
): Promise<void> {
  for (const tensor of [prompt.embeds, negative?.embeds, references?.latents]) {
    if (tensor !== undefined) await collectives?.broadcast(tensor, { source: 0, signal })
  }
}

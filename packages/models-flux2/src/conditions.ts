import type { Flux2KleinComponents } from './components.ts'
import type { Flux2KleinOptions, ResolvedOptions } from './generation-options.ts'
import { type Prompt, promptFromEmbeds } from './prompt.ts'
import { encodeKleinPrompt } from './prompt-klein.ts'

/** What a denoising is pulled to and, with guidance, away from. */
export interface Conditions {
  readonly prompt: Prompt
  readonly negative: Prompt | undefined
  readonly guidanceScale: number
}

/** Embeds the prompt of a call and, where guidance needs it, the empty one. */
export async function encodeConditions(
  components: Pick<Flux2KleinComponents, 'tokenizer' | 'textEncoder' | 'transformer' | 'isDistilled'>,
  options: Pick<Flux2KleinOptions, 'prompt' | 'promptEmbeds' | 'negativePromptEmbeds' | 'guidanceScale' | 'signal'>,
  resolved: ResolvedOptions,
): Promise<Conditions> {
  const { numImagesPerPrompt, guidanceScale } = resolved
  const isFirstRank = (components.transformer.collectives?.rank ?? 0) === 0
  const encode = async (prompts: readonly string[], embeds: Flux2KleinOptions['promptEmbeds']) =>
    embeds === undefined
      ? encodeKleinPrompt(prompts, components, { ...resolved, warns: isFirstRank, signal: options.signal })
      : promptFromEmbeds(embeds, components.transformer.config.jointAttentionDim, numImagesPerPrompt)
  const prompts = typeof options.prompt === 'string' ? [options.prompt] : (options.prompt ?? [])
  const prompt = await encode(prompts, options.promptEmbeds)
  if (components.isDistilled && (options.guidanceScale ?? 0) > 1 && isFirstRank) warnIgnored(guidanceScale)
  if (components.isDistilled || guidanceScale <= 1) return { prompt, negative: undefined, guidanceScale }
  const count = (prompt.embeds.shape[0] as number) / numImagesPerPrompt
  const negative = await encode(new Array<string>(count).fill(''), options.negativePromptEmbeds)
  return { prompt, negative, guidanceScale }
}

function warnIgnored(guidanceScale: number): void {
  process.emitWarning(`guidanceScale ${guidanceScale} is ignored: the model is distilled and takes no guidance`, {
    code: 'GUIDANCE_IGNORED',
  })
}

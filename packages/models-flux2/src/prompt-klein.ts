import type { TokenizedText, Tokenizer } from '@rankwise/diffusion'
import { type EncodePromptOptions, embedPrompts, type Prompt, type PromptEncoder } from './prompt.ts'

/** Embeds prompts of FLUX.2-klein with Qwen3, as `embedPrompts` does. */
export async function encodeKleinPrompt(
  prompts: readonly string[],
  encoder: PromptEncoder,
  options: EncodePromptOptions,
): Promise<Prompt> {
  return embedPrompts(prompts, encoder, tokenizeKleinPrompt, options)
}

/** A chat turn whose thinking block is closed at once, padded on the right. */
function tokenizeKleinPrompt(tokenizer: Tokenizer, prompt: string, maxLength: number): TokenizedText {
  const text = tokenizer.applyChatTemplate([{ role: 'user', content: prompt }], {
    addGenerationPrompt: true,
    enableThinking: false,
  })
  return tokenizer.encode(text, { maxLength, padding: 'max_length' })
}

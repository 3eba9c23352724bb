import type { ChatMessage, TokenizedText, Tokenizer } from '@rankwise/diffusion'
import { type EncodePromptOptions, embedPrompts, type Prompt, type PromptEncoder } from './prompt.ts'

/** What FLUX.2-dev was trained with; from `flux2/system_messages.py` of black-forest-labs/flux2, line break included. */
export const SYSTEM_MESSAGE =
  'You are an AI that reasons about image descriptions. You give structured responses focusing on object ' +
  'relationships, object\nattribution and actions without speculation.'

/** Stands for a picture that is not there. */
const IMAGE_TOKEN = '[IMG]'

/** Embeds prompts of FLUX.2-dev with Mistral 3, as `embedPrompts` does. */
export async function encodeDevPrompt(
  prompts: readonly string[],
  encoder: PromptEncoder,
  options: EncodePromptOptions,
): Promise<Prompt> {
  return embedPrompts(prompts, encoder, tokenizeDevPrompt, options)
}

/** A chat of system message and prompt; the checkpoint's tokenizer pads it on the left and cuts it on the right. */
export function tokenizeDevPrompt(tokenizer: Tokenizer, prompt: string, maxLength: number): TokenizedText {
  const text = tokenizer.applyChatTemplate(devMessages(prompt))
  // The template begins with <s> itself.
  return tokenizer.encode(text, { maxLength, padding: 'max_length', addSpecialTokens: false })
}

/** The chat that a prompt becomes. */
export function devMessages(prompt: string): readonly ChatMessage[] {
  const message = (role: string, text: string): ChatMessage => ({ role, content: [{ type: 'text', text }] })
  return [message('system', SYSTEM_MESSAGE), message('user', prompt.replaceAll(IMAGE_TOKEN, ''))]
}

import type { Qwen3ForCausalLM } from '@rankwise/diffusion'

/** What embeds the tokens of a prompt. */
export interface TextEncoder extends Pick<Qwen3ForCausalLM, 'encode' | 'dispose'>, AsyncDisposable {}

import type { DecoderTextEncoder } from '@rankwise/diffusion'

/** What embeds the tokens of a prompt. */
export interface TextEncoder extends Pick<DecoderTextEncoder, 'encode' | 'dispose'>, AsyncDisposable {}

import { Linear, Module, type TracedTensor } from '@rankwise/core'
import { type AttentionContext, DecoderAttention } from './attention.ts'
import type { DecoderConfig } from './config.ts'
import { DecoderRMSNorm } from './rms-norm.ts'

/** Feed-forward with a SiLU gate (Shazeer 2020, arXiv:2002.05202). */
export class DecoderMLP extends Module {
  readonly gate_proj: Linear
  readonly up_proj: Linear
  readonly down_proj: Linear

  constructor({ hiddenSize, intermediateSize }: DecoderConfig) {
    super()
    this.gate_proj = new Linear(hiddenSize, intermediateSize, { bias: false })
    this.up_proj = new Linear(hiddenSize, intermediateSize, { bias: false })
    this.down_proj = new Linear(intermediateSize, hiddenSize, { bias: false })
  }

  /** `[batch, tokens, hiddenSize]` to the same. */
  override forward(x: TracedTensor): TracedTensor {
    return this.down_proj.call(this.gate_proj.call(x).silu().mul(this.up_proj.call(x)))
  }
}

/** One layer: attention and feed-forward, each normalised before and added to its input. */
export class DecoderLayer extends Module {
  readonly self_attn: DecoderAttention
  readonly mlp: DecoderMLP
  readonly input_layernorm: DecoderRMSNorm
  readonly post_attention_layernorm: DecoderRMSNorm

  constructor(config: DecoderConfig) {
    super()
    this.self_attn = new DecoderAttention(config)
    this.mlp = new DecoderMLP(config)
    this.input_layernorm = new DecoderRMSNorm(config.hiddenSize, config.rmsNormEps)
    this.post_attention_layernorm = new DecoderRMSNorm(config.hiddenSize, config.rmsNormEps)
  }

  /** `[batch, tokens, hiddenSize]` to the same. */
  override forward(x: TracedTensor, context: AttentionContext): TracedTensor {
    const attended = x.add(this.self_attn.call(this.input_layernorm.call(x), context))
    return attended.add(this.mlp.call(this.post_attention_layernorm.call(attended)))
  }
}

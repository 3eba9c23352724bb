import { Linear, Module, RMSNorm, type TracedTensor } from '@rankwise/core'
import { type AttentionContext, Qwen3Attention } from './attention.ts'
import type { Qwen3Config } from './config.ts'

/** Feed-forward with a SiLU gate (Shazeer 2020, arXiv:2002.05202). */
export class Qwen3MLP extends Module {
  readonly gate_proj: Linear
  readonly up_proj: Linear
  readonly down_proj: Linear

  constructor({ hiddenSize, intermediateSize }: Qwen3Config) {
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
export class Qwen3DecoderLayer extends Module {
  readonly self_attn: Qwen3Attention
  readonly mlp: Qwen3MLP
  readonly input_layernorm: RMSNorm
  readonly post_attention_layernorm: RMSNorm

  constructor(config: Qwen3Config) {
    super()
    this.self_attn = new Qwen3Attention(config)
    this.mlp = new Qwen3MLP(config)
    this.input_layernorm = new RMSNorm(config.hiddenSize, { eps: config.rmsNormEps })
    this.post_attention_layernorm = new RMSNorm(config.hiddenSize, { eps: config.rmsNormEps })
  }

  /** `[batch, tokens, hiddenSize]` to the same. */
  override forward(x: TracedTensor, context: AttentionContext): TracedTensor {
    const attended = x.add(this.self_attn.call(this.input_layernorm.call(x), context))
    return attended.add(this.mlp.call(this.post_attention_layernorm.call(attended)))
  }
}

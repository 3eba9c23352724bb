import { attention, Linear, Module, RMSNorm, rope, type TracedTensor } from '@rankwise/core'
import type { Qwen3Config } from './config.ts'

/** What all layers share and the host computes from the number of tokens and their mask. */
export interface AttentionContext {
  /** Rotary table `[tokens, headDim / 2]`. */
  readonly cos: TracedTensor
  /** Rotary table `[tokens, headDim / 2]`. */
  readonly sin: TracedTensor
  /** Added to the scores, `[batch, 1, tokens, tokens]`. */
  readonly bias: TracedTensor
}

/** Causal self-attention whose queries share keys and values in groups; q and k are normalised head by head. */
export class Qwen3Attention extends Module {
  readonly q_proj: Linear
  readonly k_proj: Linear
  readonly v_proj: Linear
  readonly o_proj: Linear
  readonly q_norm: RMSNorm
  readonly k_norm: RMSNorm
  readonly #config: Qwen3Config

  constructor(config: Qwen3Config) {
    super()
    const { hiddenSize, numAttentionHeads, numKeyValueHeads, headDim, rmsNormEps } = config
    const [queries, keys] = [numAttentionHeads * headDim, numKeyValueHeads * headDim]
    this.q_proj = new Linear(hiddenSize, queries, { bias: false })
    this.k_proj = new Linear(hiddenSize, keys, { bias: false })
    this.v_proj = new Linear(hiddenSize, keys, { bias: false })
    this.o_proj = new Linear(queries, hiddenSize, { bias: false })
    this.q_norm = new RMSNorm(headDim, { eps: rmsNormEps })
    this.k_norm = new RMSNorm(headDim, { eps: rmsNormEps })
    this.#config = config
  }

  /** `[batch, tokens, hiddenSize]` to the same. */
  override forward(x: TracedTensor, { cos, sin, bias }: AttentionContext): TracedTensor {
    const { numAttentionHeads, numKeyValueHeads, headDim } = this.#config
    const q = this.q_norm.call(this.q_proj.call(x).unflatten(-1, [numAttentionHeads, headDim]))
    const k = this.k_norm.call(this.k_proj.call(x).unflatten(-1, [numKeyValueHeads, headDim]))
    const v = this.v_proj.call(x).unflatten(-1, [numKeyValueHeads, headDim])
    const rotate = (heads: TracedTensor) => rope(heads, cos, sin, { interleaved: false })
    return this.o_proj.call(attention(rotate(q), rotate(k), v, { bias }).flatten(2, 3))
  }
}

import { attention, Linear, Module, type TracedTensor } from '@rankwise/core'
import type { DecoderConfig } from './config.ts'
import { DecoderRMSNorm } from './rms-norm.ts'
import { rotate } from './rotate.ts'

/** What all layers share and the host computes from the number of tokens and their mask. */
export interface AttentionContext {
  /** Rotary table `[tokens, headDim / 2]`. */
  readonly cos: TracedTensor
  /** Rotary table `[tokens, headDim / 2]`. */
  readonly sin: TracedTensor
  /** Added to the scores, `[batch, 1, tokens, tokens]`. */
  readonly bias: TracedTensor
}

/** Causal self-attention whose queries share keys and values in groups; Qwen3 normalises q and k head by head. */
export class DecoderAttention extends Module {
  readonly q_proj: Linear
  readonly k_proj: Linear
  readonly v_proj: Linear
  readonly o_proj: Linear
  readonly q_norm: DecoderRMSNorm | undefined
  readonly k_norm: DecoderRMSNorm | undefined
  readonly #config: DecoderConfig

  constructor(config: DecoderConfig) {
    super()
    const { hiddenSize, numAttentionHeads, numKeyValueHeads, headDim } = config
    const [queries, keys] = [numAttentionHeads * headDim, numKeyValueHeads * headDim]
    this.q_proj = new Linear(hiddenSize, queries, { bias: false })
    this.k_proj = new Linear(hiddenSize, keys, { bias: false, heads: numKeyValueHeads })
    this.v_proj = new Linear(hiddenSize, keys, { bias: false, heads: numKeyValueHeads })
    this.o_proj = new Linear(queries, hiddenSize, { bias: false })
    this.q_norm = headNorm(config)
    this.k_norm = headNorm(config)
    this.#config = config
  }

  /** `[batch, tokens, hiddenSize]` to the same. */
  override forward(x: TracedTensor, { cos, sin, bias }: AttentionContext): TracedTensor {
    const { numAttentionHeads, numKeyValueHeads, headDim } = this.#config
    const q = this.q_proj.call(x).unflatten(-1, [numAttentionHeads, headDim])
    const k = this.k_proj.call(x).unflatten(-1, [numKeyValueHeads, headDim])
    const v = this.v_proj.call(x).unflatten(-1, [numKeyValueHeads, headDim])
    const [queries, keys] = [normalize(q, this.q_norm), normalize(k, this.k_norm)]
    const attended = attention(rotate(queries, cos, sin), rotate(keys, cos, sin), v, { bias })
    return this.o_proj.call(attended.flatten(2, 3))
  }
}

function headNorm({ normalizesHeads, headDim, rmsNormEps }: DecoderConfig): DecoderRMSNorm | undefined {
  return normalizesHeads ? new DecoderRMSNorm(headDim, rmsNormEps) : undefined
}

function normalize(heads: TracedTensor, norm: DecoderRMSNorm | undefined): TracedTensor {
  return norm === undefined ? heads : norm.call(heads)
}

import { colwiseHeads, type TensorParallelPlan } from '@rankwise/core'

/**
 * How a decoder is split over ranks. Ranks beyond the number of key and value heads share these; a table of embeddings,
 * a tenth of Qwen3-4B, is dealt out by columns.
 *
 * Left out on purpose, so replicated: `input_layernorm` and `post_attention_layernorm`, which run over the whole hidden
 * dimension, and `q_norm` and `k_norm`, which run over headDim after the heads are dealt out.
 *
 * @param path - of the decoder in the model: `model`
 */
export function decoderPlan(path: string): TensorParallelPlan {
  return {
    [`${path}.embed_tokens`]: 'colwise',
    [`${path}.layers.*.self_attn.q_proj`]: 'colwise',
    [`${path}.layers.*.self_attn.k_proj`]: colwiseHeads(),
    [`${path}.layers.*.self_attn.v_proj`]: colwiseHeads(),
    [`${path}.layers.*.self_attn.o_proj`]: 'rowwise',
    [`${path}.layers.*.mlp.gate_proj`]: 'colwise',
    [`${path}.layers.*.mlp.up_proj`]: 'colwise',
    [`${path}.layers.*.mlp.down_proj`]: 'rowwise',
  }
}

import { packedColwise, packedRowwise, type TensorParallelPlan } from '@rankwise/core'

/**
 * How `Flux2Transformer2DModel` is split over ranks; the same as diffusers' `_tp_plan`.
 *
 * Left out on purpose, so replicated:
 * - `x_embedder`, `context_embedder`, `proj_out`: their outputs and inputs are the residual stream, which every rank
 *   holds whole.
 * - `time_guidance_embed`, `double_stream_modulation_*`, `single_stream_modulation`, `norm_out`: they scale and shift
 *   the whole hidden dimension.
 * - `norm_q`, `norm_k`, `norm_added_*`: they run over headDim after the heads are dealt out, so every rank needs all of it.
 */
export const flux2Plan: TensorParallelPlan = {
  'transformer_blocks.*.attn.to_q': 'colwise',
  'transformer_blocks.*.attn.to_k': 'colwise',
  'transformer_blocks.*.attn.to_v': 'colwise',
  'transformer_blocks.*.attn.to_out.0': 'rowwise',
  'transformer_blocks.*.attn.add_q_proj': 'colwise',
  'transformer_blocks.*.attn.add_k_proj': 'colwise',
  'transformer_blocks.*.attn.add_v_proj': 'colwise',
  'transformer_blocks.*.attn.to_add_out': 'rowwise',
  // Gate and up are equal halves of one projection.
  'transformer_blocks.*.ff.linear_in': packedColwise([1, 1]),
  'transformer_blocks.*.ff.linear_out': 'rowwise',
  'transformer_blocks.*.ff_context.linear_in': packedColwise([1, 1]),
  'transformer_blocks.*.ff_context.linear_out': 'rowwise',
  // q, k, v, gate, up and attention, MLP: sizes depend on mlpRatio, so the Linears carry them.
  'single_transformer_blocks.*.attn.to_qkv_mlp_proj': packedColwise(),
  'single_transformer_blocks.*.attn.to_out': packedRowwise(),
}

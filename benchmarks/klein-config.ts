/** How many blocks of FLUX.2-klein-4B's widths a model has. */
export interface Blocks {
  readonly double: number
  readonly single: number
}

/** The config of a FLUX.2 transformer, as its `config.json` has it. */
export type Flux2Config = ReturnType<typeof kleinConfig>

/** The widths of FLUX.2-klein-4B. */
export function kleinConfig({ double, single }: Blocks) {
  return {
    _class_name: 'Flux2Transformer2DModel',
    attention_head_dim: 128,
    axes_dims_rope: [32, 32, 32, 32],
    eps: 1e-6,
    guidance_embeds: false,
    in_channels: 128,
    joint_attention_dim: 7680,
    mlp_ratio: 3,
    num_attention_heads: 24,
    num_layers: double,
    num_single_layers: single,
    out_channels: null,
    patch_size: 1,
    rope_theta: 2000,
    timestep_guidance_channels: 256,
  }
}

/** A pipeline of the FLUX.2 family, as the configs of its folder. */
export interface Flux2Preset {
  /** Class of the pipeline, for `model_index.json`. */
  readonly className: 'Flux2Pipeline' | 'Flux2KleinPipeline'
  /** Whether the model was distilled to few steps and takes no guidance. */
  readonly isDistilled: boolean
  readonly transformer: Readonly<ReturnType<typeof transformer>>
  readonly textEncoder: Readonly<Record<string, unknown>>
}

/** Names of the presets. */
export type Flux2PresetName = 'flux2-dev' | 'flux2-klein-4b' | 'flux2-klein-9b'

/**
 * The sizes of the published models: widths, heads and blocks of their `config.json`s. Autoencoder and scheduler are the
 * same for all of them, and their classes' defaults.
 */
export const FLUX2_PRESETS: Readonly<Record<Flux2PresetName, Flux2Preset>> = {
  'flux2-dev': {
    className: 'Flux2Pipeline',
    isDistilled: false,
    transformer: transformer({ layers: 8, singleLayers: 48, heads: 48, jointDim: 15360, guidance: true }),
    textEncoder: {
      architectures: ['Mistral3ForConditionalGeneration'],
      model_type: 'mistral3',
      text_config: {
        model_type: 'mistral',
        ...decoder({ hidden: 5120, intermediate: 32768, layers: 40, vocab: 131072, theta: 1e9, eps: 1e-5 }),
        sliding_window: null,
      },
    },
  },
  'flux2-klein-4b': {
    className: 'Flux2KleinPipeline',
    isDistilled: true,
    transformer: transformer({ layers: 5, singleLayers: 20, heads: 24, jointDim: 7680, guidance: false }),
    textEncoder: qwen3({ hidden: 2560, intermediate: 9728 }),
  },
  'flux2-klein-9b': {
    className: 'Flux2KleinPipeline',
    isDistilled: true,
    transformer: transformer({ layers: 8, singleLayers: 24, heads: 32, jointDim: 12288, guidance: false }),
    textEncoder: qwen3({ hidden: 4096, intermediate: 12288 }),
  },
}

interface TransformerSize {
  readonly layers: number
  readonly singleLayers: number
  readonly heads: number
  readonly jointDim: number
  readonly guidance: boolean
}

function transformer({ layers, singleLayers, heads, jointDim, guidance }: TransformerSize) {
  return {
    _class_name: 'Flux2Transformer2DModel',
    attention_head_dim: 128,
    axes_dims_rope: [32, 32, 32, 32],
    eps: 1e-6,
    guidance_embeds: guidance,
    in_channels: 128,
    joint_attention_dim: jointDim,
    mlp_ratio: 3,
    num_attention_heads: heads,
    num_layers: layers,
    num_single_layers: singleLayers,
    out_channels: null,
    patch_size: 1,
    rope_theta: 2000,
    timestep_guidance_channels: 256,
  }
}

interface DecoderSize {
  readonly hidden: number
  readonly intermediate: number
  readonly layers: number
  readonly vocab: number
  readonly theta: number
  readonly eps: number
}

/** Every text encoder of the family has 32 heads, 8 of keys and values, of 128 channels. */
function decoder({ hidden, intermediate, layers, vocab, theta, eps }: DecoderSize) {
  return {
    head_dim: 128,
    hidden_act: 'silu',
    hidden_size: hidden,
    intermediate_size: intermediate,
    num_attention_heads: 32,
    num_hidden_layers: layers,
    num_key_value_heads: 8,
    rms_norm_eps: eps,
    rope_parameters: { rope_theta: theta, rope_type: 'default' },
    vocab_size: vocab,
  }
}

function qwen3(size: Pick<DecoderSize, 'hidden' | 'intermediate'>) {
  return {
    architectures: ['Qwen3ForCausalLM'],
    model_type: 'qwen3',
    ...decoder({ ...size, layers: 36, vocab: 151936, theta: 1e6, eps: 1e-6 }),
  }
}

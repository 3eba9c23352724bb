import type { DecoderConfig } from './decoder/config.ts'
import { DecoderModel } from './decoder/model.ts'
import { decoderPlan } from './decoder/plan.ts'
import { DecoderTextEncoder, laterWeights } from './decoder-text-encoder.ts'
import { parseQwen3Config } from './qwen3-config.ts'

/** Hidden states that FLUX.2-klein takes its prompt embeddings from. */
const OUT_LAYERS = [9, 18, 27]

/** Qwen3 as a text encoder: its hidden states are the prompt embeddings of FLUX.2-klein. */
export class Qwen3ForCausalLM extends DecoderTextEncoder {
  static readonly weightsName = 'model'
  static readonly tensorParallelPlan = decoderPlan('model')
  static readonly ignoredWeights: readonly RegExp[] = unusedWeights(OUT_LAYERS)

  readonly model: DecoderModel

  /** @throws RankwiseError `OUT_LAYERS` when the model has no such hidden states */
  constructor(config: DecoderConfig, outLayers: readonly number[] = OUT_LAYERS) {
    super(config, outLayers)
    this.model = new DecoderModel(config, Math.max(...outLayers))
  }

  /**
   * Builds the encoder that a `config.json` of transformers describes, without weights, for the hidden states
   * [9, 18, 27].
   *
   * @throws RankwiseError `OUT_LAYERS`; `CONFIG_INVALID`; `CONFIG_UNSUPPORTED` for sliding windows, biases, other
   *   activations and scaled rotary frequencies
   */
  static fromConfig(config: unknown): Qwen3ForCausalLM {
    return new Qwen3ForCausalLM(parseQwen3Config(config))
  }

  /**
   * The class for other hidden states: `Qwen3ForCausalLM.withOutLayers([10, 20]).fromPretrained(…)`.
   *
   * @param outLayers - 0 for the token embedding, k for what k layers make of it; k is less than the number of layers
   */
  static withOutLayers(outLayers: readonly number[]): typeof Qwen3ForCausalLM {
    return class extends Qwen3ForCausalLM {
      static override readonly name = 'Qwen3ForCausalLM'
      static override readonly ignoredWeights = unusedWeights(outLayers)

      static override fromConfig(config: unknown): Qwen3ForCausalLM {
        return new Qwen3ForCausalLM(parseQwen3Config(config), outLayers)
      }
    }
  }

  protected override get decoder(): DecoderModel {
    return this.model
  }
}

function unusedWeights(outLayers: readonly number[]): readonly RegExp[] {
  return laterWeights('', outLayers)
}

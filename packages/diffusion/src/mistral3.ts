import { Module, type TracedTensor } from '@rankwise/core'
import type { AttentionContext } from './decoder/attention.ts'
import type { DecoderConfig } from './decoder/config.ts'
import { DecoderModel } from './decoder/model.ts'
import { decoderPlan } from './decoder/plan.ts'
import { DecoderTextEncoder, laterWeights } from './decoder-text-encoder.ts'
import { parseMistral3Config } from './mistral3-config.ts'

/** Hidden states that FLUX.2-dev takes its prompt embeddings from. */
const OUT_LAYERS = [10, 20, 30]

/**
 * The language model of Mistral 3 as a text encoder: its hidden states are the prompt embeddings of FLUX.2-dev. Vision
 * tower and projector are left in the checkpoint.
 */
export class Mistral3ForConditionalGeneration extends DecoderTextEncoder {
  static readonly weightsName = 'model'
  static readonly tensorParallelPlan = decoderPlan('language_model.model')
  static readonly ignoredWeights: readonly RegExp[] = unusedWeights(OUT_LAYERS)

  readonly language_model: MistralLanguageModel

  /** @throws RankwiseError `OUT_LAYERS` when the model has no such hidden states */
  constructor(config: DecoderConfig, outLayers: readonly number[] = OUT_LAYERS) {
    super(config, outLayers)
    this.language_model = new MistralLanguageModel(config, Math.max(...outLayers))
  }

  /**
   * Builds the encoder that a `config.json` of transformers describes, without weights, for the hidden states
   * [10, 20, 30].
   *
   * @throws RankwiseError `OUT_LAYERS`; `CONFIG_INVALID`; `CONFIG_UNSUPPORTED` for other language models, sliding
   *   windows, other activations and scaled rotary frequencies
   */
  static fromConfig(config: unknown): Mistral3ForConditionalGeneration {
    return new Mistral3ForConditionalGeneration(parseMistral3Config(config))
  }

  /**
   * The class for other hidden states: `Mistral3ForConditionalGeneration.withOutLayers([10, 20]).fromPretrained(…)`.
   *
   * @param outLayers - 0 for the token embedding, k for what k layers make of it; k is less than the number of layers
   */
  static withOutLayers(outLayers: readonly number[]): typeof Mistral3ForConditionalGeneration {
    return class extends Mistral3ForConditionalGeneration {
      static override readonly name = 'Mistral3ForConditionalGeneration'
      static override readonly ignoredWeights = unusedWeights(outLayers)

      static override fromConfig(config: unknown): Mistral3ForConditionalGeneration {
        return new Mistral3ForConditionalGeneration(parseMistral3Config(config), outLayers)
      }
    }
  }

  protected override get decoder(): DecoderModel {
    return this.language_model.model
  }
}

/** What the checkpoint has beside the vision tower. */
class MistralLanguageModel extends Module {
  readonly model: DecoderModel

  constructor(config: DecoderConfig, depth: number) {
    super()
    this.model = new DecoderModel(config, depth)
  }

  /** As that of the decoder. */
  override forward(inputIds: TracedTensor, context: AttentionContext, depth: number): readonly TracedTensor[] {
    return this.model.call(inputIds, context, depth)
  }
}

function unusedWeights(outLayers: readonly number[]): readonly RegExp[] {
  return [...laterWeights('language_model.', outLayers), /^vision_tower\./, /^multi_modal_projector\./]
}

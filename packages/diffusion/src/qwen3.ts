import {
  concat,
  type Graph,
  ModelMixin,
  RankwiseError,
  type RunOptions,
  sameShape,
  type Tensor,
  type TracedTensor,
  trace,
} from '@rankwise/core'
import type { AttentionContext } from './qwen3/attention.ts'
import { causalAttentionBias } from './qwen3/attention-bias.ts'
import { parseQwen3Config, type Qwen3Config } from './qwen3/config.ts'
import { Qwen3Model } from './qwen3/model.ts'
import { rotaryTables } from './qwen3/rotary-tables.ts'

/** Hidden states that FLUX.2-klein takes its prompt embeddings from. */
const KLEIN_OUT_LAYERS = [9, 18, 27]

/** Tokenised texts of one length. */
export interface Qwen3Inputs {
  /** int32 `[batch, tokens]` */
  readonly inputIds: Tensor<'int32'>
  /** int32 `[batch, tokens]`: 1 for a token, 0 for padding. */
  readonly attentionMask: Tensor<'int32'>
}

/** Options of `encode`. */
export interface Qwen3EncodeOptions extends RunOptions {
  /** Hidden states to return, 0 being the token embedding and k what k layers make of it. @default those of the class */
  readonly outLayers?: readonly number[]
}

/** What a forward takes. */
export interface Qwen3ForwardInputs extends AttentionContext {
  /** int32 `[batch, tokens]` */
  readonly inputIds: TracedTensor
}

/**
 * Qwen3 as a text encoder: its hidden states are the prompt embeddings of FLUX.2-klein. Only the layers up to the last
 * of those are built and loaded; later ones, the final norm and the head are left in the checkpoint.
 */
export class Qwen3ForCausalLM extends ModelMixin {
  static readonly weightsName = 'model'
  static readonly ignoredWeights: readonly RegExp[] = unusedWeights(KLEIN_OUT_LAYERS)

  readonly config: Qwen3Config
  /** Hidden states that `encode` returns unless it is told otherwise. */
  readonly outLayers: readonly number[]
  readonly model: Qwen3Model

  /** @throws RankwiseError `OUT_LAYERS` when the model has no such hidden states */
  constructor(config: Qwen3Config, outLayers: readonly number[] = KLEIN_OUT_LAYERS) {
    super()
    // The state behind the last layer is returned by transformers only after the final norm, which is not built.
    requireOutLayers(outLayers, config.numHiddenLayers - 1)
    this.config = config
    this.outLayers = outLayers
    this.model = new Qwen3Model(config, Math.max(...outLayers))
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

  override get numAttentionHeads(): number {
    return this.config.numAttentionHeads
  }

  /**
   * Prompt embeddings: for every token its hidden states one after the other. Rows of padding have embeddings too, made
   * of the tokens before them.
   *
   * @returns `[batch, tokens, outLayers.length * hiddenSize]` in the dtype of the model
   * @throws RankwiseError `TOKENS_SHAPE`, `TOKEN_ID`, `ATTENTION_MASK`, `OUT_LAYERS`, `MODEL_NOT_LOADED`, `ABORTED`, and
   *   those of the backend
   */
  async encode({ inputIds, attentionMask }: Qwen3Inputs, options: Qwen3EncodeOptions = {}): Promise<Tensor> {
    const { outLayers = this.outLayers, ...run } = options
    requireOutLayers(outLayers, this.model.layers.length)
    requireTokens(inputIds, attentionMask, this.config.vocabSize)
    const { headDim, ropeTheta } = this.config
    const { cos, sin } = rotaryTables(inputIds.shape[1] as number, headDim, ropeTheta)
    const inputs = {
      inputIds,
      cos: cos.cast(this.dtype),
      sin: sin.cast(this.dtype),
      bias: causalAttentionBias(attentionMask).cast(this.dtype),
    }
    const { promptEmbeds } = await this.execute(
      `encode[${outLayers.join()}]`,
      inputs,
      (traced) => ({ promptEmbeds: this.forward(traced, outLayers) }),
      run,
    )
    return promptEmbeds as Tensor
  }

  /** Hidden states side by side, `[batch, tokens, outLayers.length * hiddenSize]`. */
  override forward({ inputIds, ...context }: Qwen3ForwardInputs, outLayers: readonly number[]): TracedTensor {
    const states = this.model.call(inputIds, context, Math.max(...outLayers))
    return concat(
      outLayers.map((k) => states[k] as TracedTensor),
      -1,
    )
  }

  override traceExample(): Graph {
    const tokens = 2
    const table = { dtype: 'float32', shape: [tokens, this.config.headDim / 2] } as const
    const inputs = {
      inputIds: { dtype: 'int32', shape: [1, tokens] },
      cos: table,
      sin: table,
      bias: { dtype: 'float32', shape: [1, 1, tokens, tokens] },
    } as const
    return trace('Qwen3ForCausalLM.forward', this, inputs, (traced) => ({
      promptEmbeds: this.forward(traced, this.outLayers),
    }))
  }
}

/** Weights behind the last layer that is built. */
function unusedWeights(outLayers: readonly number[]): readonly RegExp[] {
  const built = Array.from({ length: Math.max(...outLayers) }, (_, i) => i)
  return [new RegExp(`^model\\.layers\\.(?!(${built.join('|')})\\.)`), /^model\.norm\./, /^lm_head\./]
}

function requireOutLayers(outLayers: readonly number[], last: number): void {
  if (outLayers.length > 0 && outLayers.every((k) => Number.isInteger(k) && k >= 0 && k <= last)) return
  throw new RankwiseError('OUT_LAYERS', 'the encoder has no such hidden states', {
    where: 'Qwen3ForCausalLM',
    actual: { outLayers, last },
    rule: `0 is the token embedding and k the state behind k layers, up to ${last}; the last layer of all is not run`,
    remedy: 'load the model with Qwen3ForCausalLM.withOutLayers, and leave out its last layer',
  })
}

function requireTokens(inputIds: Tensor<'int32'>, attentionMask: Tensor<'int32'>, vocabSize: number): void {
  const where = 'Qwen3ForCausalLM'
  const { shape } = inputIds
  if (shape.length !== 2 || shape.includes(0) || !sameShape(shape, attentionMask.shape)) {
    throw new RankwiseError('TOKENS_SHAPE', 'token ids and mask do not go together', {
      where,
      actual: { inputIds: shape, attentionMask: attentionMask.shape },
      rule: 'both are [batch, tokens]',
    })
  }
  const unknown = inputIds.data.find((id) => id < 0 || id >= vocabSize)
  if (unknown !== undefined) {
    throw new RankwiseError('TOKEN_ID', `the model has no token ${unknown}`, {
      where,
      actual: { id: unknown, vocabSize },
      rule: 'token ids are at least 0 and less than vocabSize',
      remedy: 'use the tokenizer of the same pipeline',
    })
  }
  if (attentionMask.data.some((value) => value !== 0 && value !== 1)) {
    throw new RankwiseError('ATTENTION_MASK', 'the attention mask has other values than 0 and 1', {
      where,
      rule: '1 stands for a token, 0 for padding',
    })
  }
}

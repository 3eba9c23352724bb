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
import type { AttentionContext } from './decoder/attention.ts'
import { causalAttentionBias } from './decoder/attention-bias.ts'
import type { DecoderConfig } from './decoder/config.ts'
import type { DecoderModel } from './decoder/model.ts'
import { rotaryTables } from './decoder/rotary-tables.ts'

/** Tokenised texts of one length. */
export interface TextEncoderInputs {
  /** int32 `[batch, tokens]` */
  readonly inputIds: Tensor<'int32'>
  /** int32 `[batch, tokens]`: 1 for a token, 0 for padding. */
  readonly attentionMask: Tensor<'int32'>
}

/** Options of a text encoder's `encode`. */
export interface TextEncodeOptions extends RunOptions {
  /** Hidden states to return, 0 being the token embedding and k what k layers make of it. @default those of the class */
  readonly outLayers?: readonly number[]
}

/** Texts to hidden states, wherever the weights are. */
export interface HiddenStateEncoder extends AsyncDisposable {
  /** Hidden states `[batch, tokens, outLayers.length * hiddenSize]`, on every rank. */
  encode(inputs: TextEncoderInputs, options?: TextEncodeOptions): Promise<Tensor>
  /** Frees the weights; idempotent. */
  dispose(): Promise<void>
}

/** What a forward takes. */
export interface DecoderInputs extends AttentionContext {
  /** int32 `[batch, tokens]` */
  readonly inputIds: TracedTensor
}

/**
 * A causal language model as a text encoder: its hidden states are the prompt embeddings. Only the layers up to the last
 * of those are built and loaded; later ones, the final norm and the head are left in the checkpoint.
 */
export abstract class DecoderTextEncoder extends ModelMixin implements HiddenStateEncoder {
  readonly config: DecoderConfig
  /** Hidden states that `encode` returns unless it is told otherwise. */
  readonly outLayers: readonly number[]

  /** @throws RankwiseError `OUT_LAYERS` when the model has no such hidden states */
  constructor(config: DecoderConfig, outLayers: readonly number[]) {
    super()
    this.config = config
    this.outLayers = outLayers
    // The state behind the last layer is returned by transformers only after the final norm, which is not built.
    this.#requireOutLayers(outLayers, config.numHiddenLayers - 1)
  }

  /** The layers, wherever the checkpoint has them. */
  protected abstract get decoder(): DecoderModel

  override get numAttentionHeads(): number {
    return this.config.numAttentionHeads
  }

  /**
   * Prompt embeddings: for every token its hidden states one after the other. Rows of padding have embeddings too: behind
   * the text they are made of the tokens before them, ahead of it they all are alike. Positions count the padding.
   *
   * @returns `[batch, tokens, outLayers.length * hiddenSize]` in the dtype of the model
   * @throws RankwiseError `TOKENS_SHAPE`, `TOKEN_ID`, `ATTENTION_MASK`, `OUT_LAYERS`, `MODEL_NOT_LOADED`, `ABORTED`, and
   *   those of the backend
   */
  async encode({ inputIds, attentionMask }: TextEncoderInputs, options: TextEncodeOptions = {}): Promise<Tensor> {
    const { outLayers = this.outLayers, ...run } = options
    this.#requireOutLayers(outLayers, this.decoder.layers.length)
    requireTokens(this.constructor.name, inputIds, attentionMask, this.config.vocabSize)
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
  override forward({ inputIds, ...context }: DecoderInputs, outLayers: readonly number[]): TracedTensor {
    const states = this.decoder.call(inputIds, context, Math.max(...outLayers))
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
    return trace(`${this.constructor.name}.forward`, this, inputs, (traced) => ({
      promptEmbeds: this.forward(traced, this.outLayers),
    }))
  }

  #requireOutLayers(outLayers: readonly number[], last: number): void {
    if (outLayers.length > 0 && outLayers.every((k) => Number.isInteger(k) && k >= 0 && k <= last)) return
    const { name } = this.constructor
    throw new RankwiseError('OUT_LAYERS', 'the encoder has no such hidden states', {
      where: name,
      actual: { outLayers, last },
      rule: `0 is the token embedding and k the state behind k layers, up to ${last}; the last layer of all is not run`,
      remedy: `load the model with ${name}.withOutLayers, and leave out its last layer`,
    })
  }
}

/** Names of the weights behind the last layer that is built, of a language model at `prefix`. */
export function laterWeights(prefix: string, outLayers: readonly number[]): readonly RegExp[] {
  const path = prefix.replaceAll('.', '\\.')
  const built = Array.from({ length: Math.max(...outLayers) }, (_, i) => i)
  return [
    new RegExp(`^${path}model\\.layers\\.(?!(${built.join('|')})\\.)`),
    new RegExp(`^${path}model\\.norm\\.`),
    new RegExp(`^(${path})?lm_head\\.`),
  ]
}

function requireTokens(
  where: string,
  inputIds: Tensor<'int32'>,
  attentionMask: Tensor<'int32'>,
  vocabSize: number,
): void {
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

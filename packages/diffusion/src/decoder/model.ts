import { Embedding, Module, ModuleList, type TracedTensor } from '@rankwise/core'
import type { AttentionContext } from './attention.ts'
import type { DecoderConfig } from './config.ts'
import { DecoderLayer } from './decoder-layer.ts'

/** Token embedding and the first decoder layers, without the final norm. */
export class DecoderModel extends Module {
  readonly embed_tokens: Embedding
  readonly layers: ModuleList<DecoderLayer>

  /** @param depth - number of layers that are built */
  constructor(config: DecoderConfig, depth: number) {
    super()
    this.embed_tokens = new Embedding(config.vocabSize, config.hiddenSize)
    this.layers = new ModuleList(Array.from({ length: depth }, () => new DecoderLayer(config)))
  }

  /**
   * int32 ids `[batch, tokens]` to hidden states `[batch, tokens, hiddenSize]`: the embedding at index 0, and at index
   * k what k layers make of it.
   *
   * @param depth - how many layers run
   */
  override forward(inputIds: TracedTensor, context: AttentionContext, depth: number): readonly TracedTensor[] {
    const states = [this.embed_tokens.call(inputIds)]
    for (let k = 0; k < depth; k++) states.push(this.layers.at(k).call(states[k] as TracedTensor, context))
    return states
  }
}

import { LayerNorm, Module, type TracedTensor } from '@rankwise/core'
import { type AttentionContext, type AttentionSizes, Flux2Attention, Flux2ParallelSelfAttention } from './attention.ts'
import { Flux2FeedForward } from './feed-forward.ts'
import { addGated, modulate, type TokenModulation } from './modulation.ts'

/** Sizes of a block. */
export interface BlockSizes extends AttentionSizes {
  readonly dim: number
  readonly mlpRatio: number
}

/** Image and text tokens, each `[batch, tokens, dim]`. */
export interface Streams {
  readonly image: TracedTensor
  readonly text: TracedTensor
}

/** A double-stream block: image and text have weights of their own and meet in the attention. */
export class Flux2TransformerBlock extends Module {
  readonly norm1: LayerNorm
  readonly norm1_context: LayerNorm
  readonly attn: Flux2Attention
  readonly norm2: LayerNorm
  readonly ff: Flux2FeedForward
  readonly norm2_context: LayerNorm
  readonly ff_context: Flux2FeedForward

  constructor(sizes: BlockSizes) {
    super()
    const { dim, mlpRatio, eps } = sizes
    const norm = () => new LayerNorm(dim, { eps, elementwiseAffine: false })
    this.norm1 = norm()
    this.norm1_context = norm()
    this.attn = new Flux2Attention(dim, sizes)
    this.norm2 = norm()
    this.ff = new Flux2FeedForward(dim, mlpRatio)
    this.norm2_context = norm()
    this.ff_context = new Flux2FeedForward(dim, mlpRatio)
  }

  /** Each stream has two modulations: of the attention and of the feed-forward. */
  override forward(
    { image, text }: Streams,
    imageModulations: readonly TokenModulation[],
    textModulations: readonly TokenModulation[],
    context: AttentionContext,
  ): Streams {
    const [imageAttention, imageMlp] = imageModulations as [TokenModulation, TokenModulation]
    const [textAttention, textMlp] = textModulations as [TokenModulation, TokenModulation]
    const attended = this.attn.call(
      modulate(this.norm1.call(image), imageAttention),
      modulate(this.norm1_context.call(text), textAttention),
      context,
    )
    const imageMiddle = addGated(image, attended.image, imageAttention)
    const textMiddle = addGated(text, attended.text, textAttention)
    const imageOut = this.ff.call(modulate(this.norm2.call(imageMiddle), imageMlp))
    const textOut = this.ff_context.call(modulate(this.norm2_context.call(textMiddle), textMlp))
    return {
      image: addGated(imageMiddle, imageOut, imageMlp),
      text: addGated(textMiddle, textOut, textMlp),
    }
  }
}

/** A single-stream block over the joined tokens. */
export class Flux2SingleTransformerBlock extends Module {
  readonly norm: LayerNorm
  readonly attn: Flux2ParallelSelfAttention

  constructor(sizes: BlockSizes) {
    super()
    this.norm = new LayerNorm(sizes.dim, { eps: sizes.eps, elementwiseAffine: false })
    this.attn = new Flux2ParallelSelfAttention(sizes.dim, sizes.mlpRatio, sizes)
  }

  /** `[batch, text + image tokens, dim]` to the same. */
  override forward(x: TracedTensor, modulation: TokenModulation, context: AttentionContext): TracedTensor {
    const attended = this.attn.call(modulate(this.norm.call(x), modulation), context)
    return addGated(x, attended, modulation)
  }
}

import { concat, Linear, Module, ModuleList, RMSNorm, rope, type TracedTensor } from '@rankwise/core'
import { swiGlu } from './feed-forward.ts'
import type { TokenAttention } from './token-attention.ts'

/** What the attention of all blocks takes beside its tokens. */
export interface AttentionContext {
  /** Rotary tables of the joined text and image tokens, each `[tokens, headDim / 2]`. */
  readonly cos: TracedTensor
  readonly sin: TracedTensor
  readonly tokens: TokenAttention
}

/** Sizes that all attention of a model shares. */
export interface AttentionSizes {
  readonly heads: number
  readonly headDim: number
  readonly eps: number
}

function splitHeads(x: TracedTensor, { heads, headDim }: AttentionSizes): TracedTensor {
  return x.unflatten(-1, [heads, headDim])
}

/** Attention over heads `[batch, tokens, heads, headDim]` to `[batch, tokens, heads * headDim]`. */
function attend(q: TracedTensor, k: TracedTensor, v: TracedTensor, context: AttentionContext): TracedTensor {
  const { cos, sin, tokens } = context
  const rotated = [q, k].map((x) => rope(x, cos, sin, { interleaved: true })) as [TracedTensor, TracedTensor]
  return tokens.attend(...rotated, v).flatten(2, 3)
}

/** Joint attention of text and image tokens, each stream with projections of its own. */
export class Flux2Attention extends Module {
  readonly to_q: Linear
  readonly to_k: Linear
  readonly to_v: Linear
  readonly norm_q: RMSNorm
  readonly norm_k: RMSNorm
  /** A list, because the checkpoint names the projection `to_out.0`; its second entry, a dropout, has no weights. */
  readonly to_out: ModuleList<Linear>
  readonly norm_added_q: RMSNorm
  readonly norm_added_k: RMSNorm
  readonly add_q_proj: Linear
  readonly add_k_proj: Linear
  readonly add_v_proj: Linear
  readonly to_add_out: Linear
  readonly #sizes: AttentionSizes

  constructor(dim: number, sizes: AttentionSizes) {
    super()
    const projection = () => new Linear(dim, dim, { bias: false })
    const norm = () => new RMSNorm(sizes.headDim, { eps: sizes.eps })
    this.to_q = projection()
    this.to_k = projection()
    this.to_v = projection()
    this.norm_q = norm()
    this.norm_k = norm()
    this.to_out = new ModuleList([projection()])
    this.norm_added_q = norm()
    this.norm_added_k = norm()
    this.add_q_proj = projection()
    this.add_k_proj = projection()
    this.add_v_proj = projection()
    this.to_add_out = projection()
    this.#sizes = sizes
  }

  /** Image and text tokens `[batch, tokens, dim]` to the same. */
  override forward(
    image: TracedTensor,
    text: TracedTensor,
    context: AttentionContext,
  ): { image: TracedTensor; text: TracedTensor } {
    const heads = (x: TracedTensor) => splitHeads(x, this.#sizes)
    const imageQuery = this.norm_q.call(heads(this.to_q.call(image)))
    const imageKey = this.norm_k.call(heads(this.to_k.call(image)))
    const imageValue = heads(this.to_v.call(image))
    const textQuery = this.norm_added_q.call(heads(this.add_q_proj.call(text)))
    const textKey = this.norm_added_k.call(heads(this.add_k_proj.call(text)))
    const textValue = heads(this.add_v_proj.call(text))
    const joined = attend(
      concat([textQuery, imageQuery], 1),
      concat([textKey, imageKey], 1),
      concat([textValue, imageValue], 1),
      context,
    )
    const [textOut, imageOut] = joined.split([text.size(1), image.size(1)], 1) as [TracedTensor, TracedTensor]
    return { image: this.to_out.at(0).call(imageOut), text: this.to_add_out.call(textOut) }
  }
}

/** Self-attention and feed-forward side by side, with one projection in and one out (ViT-22B, arXiv:2302.05442). */
export class Flux2ParallelSelfAttention extends Module {
  readonly to_qkv_mlp_proj: Linear
  readonly norm_q: RMSNorm
  readonly norm_k: RMSNorm
  readonly to_out: Linear
  readonly #sizes: AttentionSizes
  readonly #mlpDim: number

  constructor(dim: number, mlpRatio: number, sizes: AttentionSizes) {
    super()
    const mlpDim = Math.trunc(dim * mlpRatio)
    this.to_qkv_mlp_proj = new Linear(dim, 3 * dim + 2 * mlpDim, {
      bias: false,
      packedColBlocks: [dim, dim, dim, mlpDim, mlpDim],
    })
    this.norm_q = new RMSNorm(sizes.headDim, { eps: sizes.eps })
    this.norm_k = new RMSNorm(sizes.headDim, { eps: sizes.eps })
    this.to_out = new Linear(dim + mlpDim, dim, { bias: false, packedRowBlocks: [dim, mlpDim] })
    this.#sizes = sizes
    this.#mlpDim = mlpDim
  }

  /** `[batch, tokens, dim]` to the same. */
  override forward(x: TracedTensor, context: AttentionContext): TracedTensor {
    const dim = x.size(-1)
    const mlpDim = this.#mlpDim
    // At once: every split copies.
    const parts = this.to_qkv_mlp_proj.call(x).split([dim, dim, dim, mlpDim, mlpDim], -1)
    const [query, key, value, gate, up] = parts as [
      TracedTensor,
      TracedTensor,
      TracedTensor,
      TracedTensor,
      TracedTensor,
    ]
    const heads = (part: TracedTensor) => splitHeads(part, this.#sizes)
    const attended = attend(this.norm_q.call(heads(query)), this.norm_k.call(heads(key)), heads(value), context)
    return this.to_out.call(concat([attended, swiGlu(gate, up)], -1))
  }
}

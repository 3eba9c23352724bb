import {
  attention,
  concat,
  Linear,
  layerNorm,
  Module,
  RMSNorm,
  rope,
  type TensorType,
  type TracedTensor,
} from '@rankwise/core'

export interface BlockSizes {
  readonly heads: number
  readonly headDim: number
  readonly mlp: number
  readonly tokens: number
}

/** A FLUX.2 single block: attention and a gated MLP side by side, from one fused projection and into another. */
export class Flux2SingleBlock extends Module {
  readonly to_qkv_mlp_proj: Linear
  readonly to_out: Linear
  readonly norm_q: RMSNorm
  readonly norm_k: RMSNorm
  readonly #sizes: BlockSizes

  constructor(sizes: BlockSizes) {
    super()
    const width = sizes.heads * sizes.headDim
    this.to_qkv_mlp_proj = new Linear(width, 3 * width + 2 * sizes.mlp, { bias: false })
    this.to_out = new Linear(width + sizes.mlp, width, { bias: false })
    this.norm_q = new RMSNorm(sizes.headDim, { eps: 1e-6 })
    this.norm_k = new RMSNorm(sizes.headDim, { eps: 1e-6 })
    this.#sizes = sizes
  }

  /** x `[1, tokens, width]`; shift, scale and gate `[1, 1, width]`; cos and sin `[tokens, headDim / 2]`. */
  override forward({ x, shift, scale, gate, cos, sin }: Record<keyof BlockInputs, TracedTensor>): TracedTensor {
    const { heads, headDim, mlp } = this.#sizes
    const width = heads * headDim
    const modulated = layerNorm(x, { eps: 1e-6 }).mul(scale.add(1)).add(shift)
    const [qkv, gated] = this.to_qkv_mlp_proj.call(modulated).split([3 * width, 2 * mlp], -1) as [
      TracedTensor,
      TracedTensor,
    ]
    const [q, k, v] = qkv.chunk(3, -1).map((part) => part.unflatten(-1, [heads, headDim])) as [
      TracedTensor,
      TracedTensor,
      TracedTensor,
    ]
    const turn = (part: TracedTensor) => rope(part, cos, sin, { interleaved: true })
    const mixed = attention(turn(this.norm_q.call(q)), turn(this.norm_k.call(k)), v).flatten(2, 3)
    const [left, right] = gated.chunk(2, -1) as [TracedTensor, TracedTensor]
    const joined = concat([mixed, left.silu().mul(right)], -1)
    return x.add(gate.mul(this.to_out.call(joined)))
  }
}

export interface BlockInputs {
  readonly x: TensorType
  readonly shift: TensorType
  readonly scale: TensorType
  readonly gate: TensorType
  readonly cos: TensorType
  readonly sin: TensorType
}

export function blockInputs({ heads, headDim, tokens }: BlockSizes): BlockInputs & Record<string, TensorType> {
  const type = (...shape: number[]): TensorType => ({ dtype: 'float32', shape })
  const row = type(1, 1, heads * headDim)
  const table = type(tokens, headDim / 2)
  return { x: type(1, tokens, heads * headDim), shift: row, scale: row, gate: row, cos: table, sin: table }
}

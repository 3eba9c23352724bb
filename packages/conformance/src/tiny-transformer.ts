import {
  attention,
  concat,
  type Graph,
  LayerNorm,
  Linear,
  layerNorm,
  ModelMixin,
  Module,
  packedColwise,
  packedRowwise,
  RMSNorm,
  type RunOptions,
  rope,
  type Tensor,
  type TensorParallelPlan,
  type TensorType,
  type TracedTensor,
  trace,
} from '@rankwise/core'

const HEADS = 4
const HEAD_DIM = 8
const DIM = HEADS * HEAD_DIM
const FF = 40
const MLP = 48
const EPS = 1e-6

interface Rotary {
  readonly cos: TracedTensor
  readonly sin: TracedTensor
}

interface Streams {
  readonly text: TracedTensor
  readonly image: TracedTensor
}

const heads = (x: TracedTensor) => x.unflatten(-1, [HEADS, HEAD_DIM])
const turned = (x: TracedTensor, { cos, sin }: Rotary) => rope(x, cos, sin, { interleaved: true })

/** `down(silu(gate) * up)` with gate and up in one projection. */
class FeedForward extends Module {
  readonly linear_in = new Linear(DIM, 2 * FF, { bias: false })
  readonly linear_out = new Linear(FF, DIM)

  override forward(x: TracedTensor): TracedTensor {
    const [gate, up] = this.linear_in.call(x).chunk(2, -1) as [TracedTensor, TracedTensor]
    return this.linear_out.call(gate.silu().mul(up))
  }
}

/** Text and image attend to both, then the image has an MLP. */
class DoubleBlock extends Module {
  readonly to_q = new Linear(DIM, DIM)
  readonly to_k = new Linear(DIM, DIM)
  readonly to_v = new Linear(DIM, DIM, { bias: false })
  readonly add_qkv = new Linear(DIM, 3 * DIM)
  readonly norm_q = new RMSNorm(HEAD_DIM, { eps: EPS })
  readonly norm_k = new RMSNorm(HEAD_DIM, { eps: EPS })
  readonly to_out = new Linear(DIM, DIM)
  readonly to_add_out = new Linear(DIM, DIM, { bias: false })
  readonly ff = new FeedForward()

  override forward({ text, image }: Streams, modulation: TracedTensor, rotary: Rotary): Streams {
    const [shift, scale, gate] = modulation.chunk(3, -1) as [TracedTensor, TracedTensor, TracedTensor]
    const x = layerNorm(image, { eps: EPS }).mul(scale.add(1)).add(shift)
    const added = this.add_qkv
      .call(layerNorm(text, { eps: EPS }))
      .chunk(3, -1)
      .map(heads)
    const own = [this.to_q, this.to_k, this.to_v].map((projection) => heads(projection.call(x)))
    const joint = own.map((part, i) => concat([added[i] as TracedTensor, part], 1))
    const [q, k, v] = joint as [TracedTensor, TracedTensor, TracedTensor]
    const turn = (norm: RMSNorm, part: TracedTensor) => turned(norm.call(part), rotary)
    const mixed = attention(turn(this.norm_q, q), turn(this.norm_k, k), v).flatten(2, 3)
    const attended = image.add(gate.mul(this.to_out.call(mixed.slice(1, text.size(1)))))
    return {
      text: text.add(this.to_add_out.call(mixed.slice(1, 0, text.size(1)))),
      image: attended.add(this.ff.call(layerNorm(attended, { eps: EPS }))),
    }
  }
}

/** Attention and a gated MLP side by side, from one fused projection into another. */
class SingleBlock extends Module {
  readonly proj_in = new Linear(DIM, 3 * DIM + 2 * MLP, { packedColBlocks: [DIM, DIM, DIM, MLP, MLP] })
  readonly proj_out = new Linear(DIM + MLP, DIM, { bias: false, packedRowBlocks: [DIM, MLP] })
  readonly norm_q = new RMSNorm(HEAD_DIM, { eps: EPS })

  override forward(x: TracedTensor, rotary: Rotary): TracedTensor {
    const pieces = this.proj_in.call(layerNorm(x, { eps: EPS })).split([DIM, DIM, DIM, MLP, MLP], -1)
    const [q, k, v, gate, up] = pieces as [TracedTensor, TracedTensor, TracedTensor, TracedTensor, TracedTensor]
    const mixed = attention(turned(this.norm_q.call(heads(q)), rotary), turned(heads(k), rotary), heads(v))
    return x.add(this.proj_out.call(concat([mixed.flatten(2, 3), gate.silu().mul(up)], -1)))
  }
}

/** Every style at least once, and unequal blocks. */
export const TINY_PLAN: TensorParallelPlan = {
  'double.to_q': 'colwise',
  'double.to_k': 'colwise',
  'double.to_v': 'colwise',
  'double.add_qkv': packedColwise([1, 1, 1]),
  'double.to_out': 'rowwise',
  'double.to_add_out': 'rowwise',
  'double.ff.linear_in': packedColwise([1, 1]),
  'double.ff.linear_out': 'rowwise',
  'single.proj_in': packedColwise(),
  'single.proj_out': packedRowwise(),
  mixer: 'rowwise_split_input',
}

/** Inputs of the tiny transformer by name. */
export type TinyInputs = Readonly<Record<'image' | 'text' | 'time' | 'cos' | 'sin', Tensor>>

type TracedInputs = { readonly [K in keyof TinyInputs]: TracedTensor }

/** A diffusion transformer in small: 25,000 weights, and every operation, style and kind of stream that large ones have. */
export class TinyTransformer extends ModelMixin {
  static readonly tensorParallelPlan: TensorParallelPlan = TINY_PLAN

  readonly x_embedder = new Linear(12, DIM)
  readonly context_embedder = new Linear(20, DIM, { bias: false })
  readonly modulation = new Linear(16, 3 * DIM)
  readonly double = new DoubleBlock()
  readonly single = new SingleBlock()
  readonly mixer = new Linear(DIM, DIM)
  readonly norm_out = new LayerNorm(DIM)
  readonly proj_out = new Linear(DIM, 12)

  static fromConfig(): TinyTransformer {
    return new TinyTransformer()
  }

  override get numAttentionHeads(): number {
    return HEADS
  }

  /** image `[batch, tokens, 12]`, text `[batch, tokens, 20]`, time `[batch, 16]`, cos and sin `[all tokens, headDim / 2]`. */
  override forward({ image, text, time, cos, sin }: TracedInputs): Readonly<Record<string, TracedTensor>> {
    const modulation = this.modulation.call(time.silu()).unsqueeze(1)
    const streams = { image: this.x_embedder.call(image), text: this.context_embedder.call(text) }
    const double = this.double.call(streams, modulation, { cos, sin })
    const single = this.single.call(concat([double.text, double.image], 1), { cos, sin })
    const mixed = single.add(this.mixer.call(single))
    const sample = this.proj_out.call(this.norm_out.call(mixed.slice(1, text.size(1))))
    return { double_text: double.text, double_image: double.image, single, sample }
  }

  run(inputs: TinyInputs, options?: RunOptions): Promise<Record<string, Tensor>> {
    return this.execute('forward', inputs, (traced) => this.forward(traced), options)
  }

  override traceExample(): Graph {
    return this.trace(TINY_TYPES)
  }

  /** The computation on inputs of these types, in their dtype. */
  trace(types: { readonly [K in keyof TinyInputs]: TensorType }): Graph {
    return trace('TinyTransformer', this, types, (traced) => this.forward(traced), types.image.dtype)
  }
}

const float32 = (...shape: number[]): TensorType => ({ dtype: 'float32', shape })

const TINY_TYPES = {
  image: float32(1, 6, 12),
  text: float32(1, 5, 20),
  time: float32(1, 16),
  cos: float32(11, HEAD_DIM / 2),
  sin: float32(11, HEAD_DIM / 2),
}

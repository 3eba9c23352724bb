import { attention, concat, constant, layerNorm, rope } from '../src/functional.ts'
import type { Graph } from '../src/graph.ts'
import { Module, ModuleList } from '../src/module.ts'
import { Linear } from '../src/nn/linear.ts'
import { LayerNorm, RMSNorm } from '../src/nn/norm.ts'
import type { TensorParallelPlan } from '../src/plan.ts'
import type { Float64Tensor } from '../src/reference/index.ts'
import { packedColwise, packedRowwise } from '../src/styles.ts'
import type { Tensor } from '../src/tensor.ts'
import type { TracedTensor } from '../src/traced-tensor.ts'
import { trace } from '../src/tracer.ts'
import { float64, randomTensor } from './support.ts'

// Small models in the manner of diffusion transformers: a text and an image stream, and blocks that read and write them.

export const HEADS = 4
const HEAD_DIM = 4
export const WIDTH = HEADS * HEAD_DIM
const INNER = 24

export type StreamName = 'text' | 'image'
export type Streams = Readonly<Record<StreamName, TracedTensor>>

/** A block of a test model, with the plan for its own Linears. */
export abstract class Block extends Module {
  abstract readonly plan: TensorParallelPlan
  /** Length of the longest chain of sums behind each stream, given those before the block. */
  abstract depths(before: Readonly<Record<StreamName, number>>): Readonly<Record<StreamName, number>>
  abstract override forward(streams: Streams, gate: TracedTensor): Streams
}

export interface StreamOptions {
  readonly stream: StreamName
  readonly bias: boolean
  readonly gated: boolean
}

/** A block that adds something to one stream; its sum is one exchange. */
abstract class ResidualBlock extends Block {
  protected readonly options: StreamOptions
  readonly norm: LayerNorm

  constructor(options: StreamOptions) {
    super()
    this.options = options
    this.norm = new LayerNorm(WIDTH, { elementwiseAffine: options.bias })
  }

  override depths(before: Readonly<Record<StreamName, number>>): Readonly<Record<StreamName, number>> {
    return { ...before, [this.options.stream]: before[this.options.stream] + 1 }
  }

  override forward(streams: Streams, gate: TracedTensor): Streams {
    const { stream, gated } = this.options
    const x = streams[stream]
    const update = this.update(this.norm.call(x))
    return { ...streams, [stream]: x.add(gated ? update.mul(gate) : update) }
  }

  protected abstract update(x: TracedTensor): TracedTensor
}

export interface AttentionOptions extends StreamOptions {
  readonly kvHeads: number
  readonly causal: boolean
  readonly rope: 'none' | 'half' | 'interleaved'
}

/** Attention over one stream, with norms per head and grouped keys. */
export class AttentionBlock extends ResidualBlock {
  readonly plan: TensorParallelPlan = { to_q: 'colwise', to_k: 'colwise', to_v: 'colwise', to_out: 'rowwise' }
  readonly to_q: Linear
  readonly to_k: Linear
  readonly to_v: Linear
  readonly norm_q = new RMSNorm(HEAD_DIM, { eps: 1e-3 })
  readonly to_out: Linear
  readonly #options: AttentionOptions

  constructor(options: AttentionOptions) {
    super(options)
    const { bias, kvHeads } = options
    this.#options = options
    this.to_q = new Linear(WIDTH, WIDTH, { bias })
    this.to_k = new Linear(WIDTH, kvHeads * HEAD_DIM, { bias })
    this.to_v = new Linear(WIDTH, kvHeads * HEAD_DIM, { bias })
    this.to_out = new Linear(WIDTH, WIDTH, { bias })
  }

  protected override update(x: TracedTensor): TracedTensor {
    const { kvHeads, causal } = this.#options
    const q = this.#rotate(this.norm_q.call(this.to_q.call(x).unflatten(-1, [HEADS, HEAD_DIM])))
    const k = this.#rotate(this.to_k.call(x).unflatten(-1, [kvHeads, HEAD_DIM]))
    const v = this.to_v.call(x).unflatten(-1, [kvHeads, HEAD_DIM])
    return this.to_out.call(attention(q, k, v, { causal }).flatten(2, 3))
  }

  #rotate(x: TracedTensor): TracedTensor {
    if (this.#options.rope === 'none') return x
    const angles = randomTensor([x.size(1), HEAD_DIM / 2], 7)
    const table = (f: (angle: number) => number) => constant(float64(angles.shape, Array.from(angles.data, f)))
    return rope(x, table(Math.cos), table(Math.sin), { interleaved: this.#options.rope === 'interleaved' })
  }
}

/** `down(silu(up(x)))`. */
export class MlpBlock extends ResidualBlock {
  readonly plan: TensorParallelPlan = { up: 'colwise', down: 'rowwise' }
  readonly up: Linear
  readonly down: Linear

  constructor(options: StreamOptions) {
    super(options)
    this.up = new Linear(WIDTH, INNER, { bias: options.bias })
    this.down = new Linear(INNER, WIDTH, { bias: options.bias })
  }

  protected override update(x: TracedTensor): TracedTensor {
    return this.down.call(this.up.call(x).silu())
  }
}

/** An MLP whose gate and up projections share one weight. */
export class SwigluBlock extends ResidualBlock {
  readonly plan: TensorParallelPlan = { up: packedColwise([1, 1]), down: 'rowwise' }
  readonly up: Linear
  readonly down: Linear

  constructor(options: StreamOptions) {
    super(options)
    this.up = new Linear(WIDTH, 2 * INNER, { bias: options.bias })
    this.down = new Linear(INNER, WIDTH, { bias: options.bias })
  }

  protected override update(x: TracedTensor): TracedTensor {
    const [gate, up] = this.up.call(x).chunk(2, -1) as [TracedTensor, TracedTensor]
    return this.down.call(gate.silu().mul(up))
  }
}

/** Attention and MLP side by side, from one fused projection into another, as in FLUX.2's single blocks. */
export class ParallelBlock extends ResidualBlock {
  readonly plan: TensorParallelPlan = { proj_in: packedColwise(), proj_out: packedRowwise() }
  readonly proj_in: Linear
  readonly proj_out: Linear

  constructor(options: StreamOptions) {
    super(options)
    const sizes = [WIDTH, WIDTH, WIDTH, INNER, INNER]
    const rows = sizes.reduce((sum, size) => sum + size, 0)
    this.proj_in = new Linear(WIDTH, rows, { bias: options.bias, packedColBlocks: sizes })
    this.proj_out = new Linear(WIDTH + INNER, WIDTH, { bias: options.bias, packedRowBlocks: [WIDTH, INNER] })
  }

  protected override update(x: TracedTensor): TracedTensor {
    const pieces = this.proj_in.call(x).split([WIDTH, WIDTH, WIDTH, INNER, INNER], -1)
    const [q, k, v, gate, up] = pieces as [TracedTensor, TracedTensor, TracedTensor, TracedTensor, TracedTensor]
    const heads = (t: TracedTensor) => t.unflatten(-1, [HEADS, HEAD_DIM])
    const mixed = attention(heads(q), heads(k), heads(v)).flatten(2, 3)
    return this.proj_out.call(concat([mixed, gate.silu().mul(up)], -1))
  }
}

/** Both streams attend to both, as in FLUX's double blocks: two sums that share one exchange. */
export class JointBlock extends Block {
  readonly plan: TensorParallelPlan = {
    to_qkv: packedColwise([1, 1, 1]),
    add_qkv: packedColwise([1, 1, 1]),
    to_out: 'rowwise',
    to_add_out: 'rowwise',
  }
  readonly to_qkv: Linear
  readonly add_qkv: Linear
  readonly to_out: Linear
  readonly to_add_out: Linear

  constructor({ bias }: { readonly bias: boolean }) {
    super()
    this.to_qkv = new Linear(WIDTH, 3 * WIDTH, { bias })
    this.add_qkv = new Linear(WIDTH, 3 * WIDTH, { bias })
    this.to_out = new Linear(WIDTH, WIDTH, { bias })
    this.to_add_out = new Linear(WIDTH, WIDTH, { bias })
  }

  override depths({ text, image }: Readonly<Record<StreamName, number>>): Readonly<Record<StreamName, number>> {
    const depth = Math.max(text, image) + 1
    return { text: depth, image: depth }
  }

  override forward({ text, image }: Streams, gate: TracedTensor): Streams {
    const qkv = (projection: Linear, x: TracedTensor) =>
      projection
        .call(layerNorm(x, { eps: 1e-3 }))
        .chunk(3, -1)
        .map((t) => t.unflatten(-1, [HEADS, HEAD_DIM]))
    const [own, added] = [qkv(this.to_qkv, image), qkv(this.add_qkv, text)]
    const joint = [0, 1, 2].map((i) => concat([added[i] as TracedTensor, own[i] as TracedTensor], 1))
    const [q, k, v] = joint as [TracedTensor, TracedTensor, TracedTensor]
    const mixed = attention(q, k, v).flatten(2, 3)
    return {
      text: text.add(this.to_add_out.call(mixed.slice(1, 0, text.size(1)))),
      image: image.add(this.to_out.call(mixed.slice(1, text.size(1))).mul(gate)),
    }
  }
}

/** A row-wise projection that slices its replicated input. */
export class SplitInputBlock extends ResidualBlock {
  readonly plan: TensorParallelPlan = { proj: 'rowwise_split_input' }
  readonly proj: Linear

  constructor(options: StreamOptions) {
    super(options)
    this.proj = new Linear(WIDTH, WIDTH, { bias: options.bias })
  }

  protected override update(x: TracedTensor): TracedTensor {
    return this.proj.call(x)
  }
}

/** Partial sums that pass through every linear operation there is before they are summed. */
export class LinearPartsBlock extends ResidualBlock {
  readonly plan: TensorParallelPlan = { up: 'colwise', down: 'rowwise', other: 'rowwise' }
  readonly up = new Linear(WIDTH, INNER)
  readonly down = new Linear(INNER, WIDTH, { bias: false })
  readonly other = new Linear(INNER, WIDTH, { bias: false })

  protected override update(x: TracedTensor): TracedTensor {
    const h = this.up.call(x).silu()
    const [a, b] = [this.down.call(h), this.other.call(h)]
    const scaled = a
      .mul(0.5)
      .mul(x)
      .sub(b.div(x.mul(x).add(1)))
    const [left, right] = scaled.chunk(2, -1) as [TracedTensor, TracedTensor]
    const joined = concat([right, left], -1).unflatten(-1, [2, WIDTH / 2])
    return joined.transpose([0, 1, 3, 2]).flatten(2, 3).add(a)
  }
}

/** A partial sum that one operation needs whole and another does not. */
export class MixedUseBlock extends ResidualBlock {
  readonly plan: TensorParallelPlan = { up: 'colwise', down: 'rowwise', other: 'rowwise' }
  readonly up = new Linear(WIDTH, INNER)
  readonly down = new Linear(INNER, WIDTH, { bias: false })
  readonly other = new Linear(INNER, WIDTH, { bias: false })
  readonly #wholeFirst: boolean

  constructor(options: StreamOptions & { readonly wholeFirst: boolean }) {
    super(options)
    this.#wholeFirst = options.wholeFirst
  }

  protected override update(x: TracedTensor): TracedTensor {
    const h = this.up.call(x).silu()
    const [a, b] = [this.down.call(h), this.other.call(h)]
    if (this.#wholeFirst) {
      const whole = a.silu()
      return whole.add(a.add(b))
    }
    const linear = a.add(b)
    return a.silu().add(linear)
  }
}

/** Blocks, and a replicated head for each stream. */
export class BlocksModel extends Module {
  readonly blocks: ModuleList<Block>
  readonly time = new Linear(WIDTH, WIDTH)
  readonly norm_out = new LayerNorm(WIDTH)
  readonly proj_out = new Linear(WIDTH, 5)

  constructor(blocks: readonly Block[]) {
    super()
    this.blocks = new ModuleList(blocks)
  }

  get plan(): TensorParallelPlan {
    return Object.fromEntries(
      [...this.blocks].flatMap((block, i) =>
        Object.entries(block.plan).map(([key, style]) => [`blocks.${i}.${key}`, style] as const),
      ),
    )
  }

  /** What the number of exchanges has to be. */
  get depth(): number {
    const depths = [...this.blocks].reduce((before, block) => block.depths(before), { text: 0, image: 0 })
    return Math.max(depths.text, depths.image)
  }

  override forward(streams: Streams, time: TracedTensor): Streams {
    const gate = this.time.call(time.silu()).unsqueeze(1)
    let current = streams
    for (const block of this.blocks) current = block.call(current, gate)
    return { text: current.text, image: this.proj_out.call(this.norm_out.call(current.image)) }
  }
}

export interface Sizes {
  readonly batch: number
  readonly textTokens: number
  readonly imageTokens: number
}

export function traceModel(model: BlocksModel, { batch, textTokens, imageTokens }: Sizes): Graph {
  const stream = (tokens: number) => ({ dtype: 'float64', shape: [batch, tokens, WIDTH] }) as const
  return trace(
    'BlocksModel',
    model,
    { text: stream(textTokens), image: stream(imageTokens), time: { dtype: 'float64', shape: [batch, WIDTH] } },
    ({ text, image, time }) => ({ ...model.call({ text, image }, time) }),
    'float64',
  )
}

/** Random weights and inputs for a graph, of a size that keeps values near 1. */
export function randomWeights(graph: Graph, seed: number): Record<string, Float64Tensor> {
  return Object.fromEntries(
    graph.parameters.map(({ name = '', shape }, i) => {
      const fanIn = shape.length > 1 ? (shape.at(-1) as number) : 1
      return [name, randomTensor(shape, seed + i, Math.sqrt(3 / fanIn))]
    }),
  )
}

export function randomInputs(graph: Graph, seed: number): Record<string, Tensor> {
  return Object.fromEntries(graph.inputs.map(({ name = '', shape }, i) => [name, randomTensor(shape, seed + 1000 + i)]))
}

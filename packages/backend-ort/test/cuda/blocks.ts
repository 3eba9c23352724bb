import { normal, rotation } from '@rankwise/conformance'
import type { Collectives } from '@rankwise/core'
import {
  type GraphExecutor as Executor,
  type Graph,
  GraphExecutor,
  Module,
  ModuleList,
  type PlacedGraph,
  packedColwise,
  packedRowwise,
  partition,
  resolvePlan,
  type Tensor,
  type TracedTensor,
  trace,
} from '@rankwise/core'
import { shardTensor } from '@rankwise/core/reference'
import type { OrtBackend } from '../../src/backend.ts'
import { type BlockInputs, type BlockSizes, blockInputs, Flux2SingleBlock } from '../flux2-single-block.ts'
import { sourceOf } from '../workers/placed-block.ts'

const SIZES: BlockSizes = { heads: 4, headDim: 32, mlp: 384, tokens: 77 }
const WIDTH = SIZES.heads * SIZES.headDim

/** Two FLUX.2 single blocks, one after the other. */
class Blocks extends Module {
  readonly blocks = new ModuleList([new Flux2SingleBlock(SIZES), new Flux2SingleBlock(SIZES)])

  override forward(inputs: Record<keyof BlockInputs, TracedTensor>): TracedTensor {
    return this.blocks.at(1).call({ ...inputs, x: this.blocks.at(0).call(inputs) })
  }
}

/** The blocks split over ranks, with inputs and whole weights. */
export interface PlacedBlocks {
  readonly graph: Graph
  readonly placed: PlacedGraph
  readonly inputs: Readonly<Record<string, Tensor>>
  readonly weights: Readonly<Record<string, Tensor>>
}

export function placedBlocks(tpDegree: number): PlacedBlocks {
  const model = new Blocks()
  const graph = trace('blocks', model, blockInputs(SIZES), (inputs) => ({ out: model.call(inputs) }))
  const plan = {
    'blocks.*.to_qkv_mlp_proj': packedColwise([WIDTH, WIDTH, WIDTH, SIZES.mlp, SIZES.mlp]),
    'blocks.*.to_out': packedRowwise([WIDTH, SIZES.mlp]),
  }
  const placed = partition(graph, resolvePlan(model, plan), tpDegree)
  const weights = Object.fromEntries(
    [...model.namedParameters()].map(([name, { shape }], i) => {
      const spread = shape.length === 1 ? { mean: 1, deviation: 0.1 } : { deviation: (shape[1] as number) ** -0.5 }
      return [name, normal(shape, 10 + i, spread)]
    }),
  )
  const inputs = Object.fromEntries(graph.inputs.map(({ name = '', shape }, i) => [name, normal(shape, i)]))
  return { graph, placed, weights, inputs: { ...inputs, ...rotation(SIZES.tokens, SIZES.headDim / 2) } }
}

/** Loads a rank's weights and compiles, as a model does. */
export async function compileBlocks(
  { placed, weights }: PlacedBlocks,
  backend: OrtBackend,
  collectives: Collectives | undefined,
): Promise<Executor> {
  const rank = collectives?.rank ?? 0
  const loaded = await Promise.all(
    placed.parameters.map(async ({ name = '', placement }) => {
      const shard = shardTensor(weights[name] as Tensor, placement, rank, placed.tpDegree).cast('float32')
      return [name, await backend.loadShard(sourceOf(shard), { dtype: 'float32' })] as const
    }),
  )
  return GraphExecutor.compile(placed, { backend, collectives, weights: new Map(loaded) })
}

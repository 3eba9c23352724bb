import { describe, expect, it } from 'vitest'
import { rmsNorm } from '../src/functional.ts'
import type { Graph } from '../src/graph.ts'
import { type Phase, type PlacedGraph, type PlacedNode, type PlacedValue, partition } from '../src/partition.ts'
import { localShape, PARTIAL, type Placement, REPLICATED, shard, shardSlices } from '../src/placement.ts'
import { resolvePlan, type TensorParallelPlan } from '../src/plan.ts'
import { type Float64Tensor, runGraph, runRanks } from '../src/reference/index.ts'
import { packedColwise, packedRowwise } from '../src/styles.ts'
import { Tensor } from '../src/tensor.ts'
import type { TracedTensor } from '../src/traced-tensor.ts'
import { codeOf, distance } from './support.ts'
import {
  AttentionBlock,
  type Block,
  BlocksModel,
  HEADS,
  JointBlock,
  MlpBlock,
  ParallelBlock,
  randomInputs,
  randomWeights,
  SplitInputBlock,
  SwigluBlock,
  traceModel,
  WIDTH,
} from './support-model.ts'

// Deliberate mistakes: a wrong plan has to be refused, a wrong partition has to be seen in the values.

const SIZES = { batch: 2, textTokens: 2, imageTokens: 3 }
const IMAGE = { stream: 'image', bias: true, gated: true } as const
const TP_DEGREE = 2

const attention = () => new AttentionBlock({ ...IMAGE, kvHeads: HEADS, causal: false, rope: 'half' })

function codeOfPlan(block: Block, change: Readonly<Record<string, TensorParallelPlan[string] | undefined>>) {
  const model = new BlocksModel([block])
  const changed = Object.entries({ ...block.plan, ...change }).filter(([, style]) => style !== undefined)
  const plan = Object.fromEntries(changed.map(([key, style]) => [`blocks.0.${key}`, style])) as TensorParallelPlan
  return codeOf(() => partition(traceModel(model, SIZES), resolvePlan(model, plan), TP_DEGREE))
}

/** Takes the norm of the query over all heads at once. */
class NormAcrossHeads extends AttentionBlock {
  protected override update(x: TracedTensor): TracedTensor {
    return this.to_out.call(rmsNorm(this.to_q.call(x), { eps: 1e-3 }))
  }
}

const joint = () => new JointBlock({ bias: false })

describe('a wrong plan is refused', () => {
  it('while the right ones are not', () => {
    for (const block of [attention(), joint(), new ParallelBlock(IMAGE), new SwigluBlock(IMAGE), new MlpBlock(IMAGE)]) {
      expect(codeOfPlan(block, {})).toBeUndefined()
    }
  })

  it.each<[title: string, block: () => Block, change: Parameters<typeof codeOfPlan>[1], code: string]>([
    [
      'colwise and rowwise swapped',
      () => new MlpBlock(IMAGE),
      { up: 'rowwise', down: 'colwise' },
      'PLACEMENT_ROWWISE_INPUT',
    ],
    ['to_out colwise', attention, { to_out: 'colwise' }, 'PLACEMENT_COLWISE_INPUT'],
    ['to_out missing', attention, { to_out: undefined }, 'PLACEMENT_REPLICATED_WEIGHT'],
    ['to_q missing', attention, { to_q: undefined }, 'PLACEMENT_ATTENTION'],
    ['to_v missing', attention, { to_v: undefined }, 'PLACEMENT_ATTENTION'],
    ['to_k rowwise', attention, { to_k: 'rowwise' }, 'PLACEMENT_ROWWISE_INPUT'],
    ['to_k rowwise with a split input', attention, { to_k: 'rowwise_split_input' }, 'PLACEMENT_ATTENTION'],
    ['one stream missing', joint, { add_qkv: undefined }, 'PLACEMENT_CONCAT'],
    ['packed marked plain', joint, { to_qkv: 'colwise' }, 'PLACEMENT_SPLIT_BLOCK'],
    ['gate and up marked plain', () => new SwigluBlock(IMAGE), { up: 'colwise' }, 'PLACEMENT_SPLIT_BLOCK'],
    [
      'a block dropped',
      () => new ParallelBlock(IMAGE),
      { proj_in: packedColwise([2, 1, 1.5, 1.5]) },
      'PACKED_BLOCKS_SUM',
    ],
    [
      'two blocks taken for one',
      () => new ParallelBlock(IMAGE),
      { proj_in: packedColwise([4, 2, 3, 3]) },
      'PLACEMENT_SPLIT_BLOCK',
    ],
    [
      'blocks in another order',
      () => new ParallelBlock(IMAGE),
      { proj_in: packedColwise([3, 3, 2, 2, 2]) },
      'PLACEMENT_SPLIT_BLOCK',
    ],
    ['packed rows marked plain', () => new ParallelBlock(IMAGE), { proj_out: 'rowwise' }, 'PLACEMENT_ROWWISE_BLOCKS'],
    [
      'packed rows in another order',
      () => new ParallelBlock(IMAGE),
      { proj_out: packedRowwise([3, 2]) },
      'PLACEMENT_ROWWISE_BLOCKS',
    ],
    [
      'a norm across heads',
      () => new NormAcrossHeads({ ...IMAGE, kvHeads: HEADS, causal: false, rope: 'none' }),
      { to_k: undefined, to_v: undefined },
      'PLACEMENT_NORM',
    ],
  ])('%s', (_title, block, change, code) => {
    expect(codeOfPlan(block(), change)).toBe(code)
  })
})

interface Example {
  readonly graph: Graph
  readonly placed: PlacedGraph
}

function place(block: Block): Example {
  const model = new BlocksModel([block])
  const graph = traceModel(model, SIZES)
  return { graph, placed: partition(graph, resolvePlan(model, model.plan), TP_DEGREE) }
}

type Weights = Record<string, Float64Tensor>

/** What is wrong with a partition: the code of an error, or `values`; undefined when nothing is. */
function findingOf(graph: Graph, placed: PlacedGraph, changeWeights = (weights: Weights) => weights) {
  const [weights, inputs] = [randomWeights(graph, 1), randomInputs(graph, 1)]
  const expected = runGraph(graph, weights, inputs)
  let ranks: ReturnType<typeof runRanks> = []
  const code = codeOf(() => {
    ranks = runRanks(placed, changeWeights(weights), inputs)
  })
  if (code !== undefined) return code
  const differs = ranks.some((outputs) =>
    Object.entries(expected).some(([name, whole]) => distance(outputs[name] as Float64Tensor, whole) > 1e-9),
  )
  return differs ? 'values' : undefined
}

/** The graph with other values in place of some; everything that refers to them follows. */
function replaceValues(graph: PlacedGraph, change: (value: PlacedValue) => PlacedValue): PlacedGraph {
  const changed = new Map<PlacedValue, PlacedValue>()
  const of = (value: PlacedValue): PlacedValue => {
    const result = changed.get(value) ?? change(value)
    changed.set(value, result)
    return result
  }
  const node = (old: PlacedNode): PlacedNode => ({ ...old, inputs: old.inputs.map(of), outputs: old.outputs.map(of) })
  return {
    ...graph,
    inputs: graph.inputs.map(of),
    parameters: graph.parameters.map(of),
    constants: graph.constants.map(of),
    phases: graph.phases.map(({ nodes, allReduce }) => ({
      nodes: nodes.map(node),
      allReduce: allReduce === undefined ? undefined : node(allReduce),
    })),
    outputs: Object.fromEntries(Object.entries(graph.outputs).map(([name, value]) => [name, of(value)])),
  }
}

/** Gives a weight another placement, as a mistaken slice would. */
function misplaceWeight(graph: PlacedGraph, name: string, placement: Placement): PlacedGraph {
  return replaceValues(graph, (value) =>
    value.name === name ? { ...value, placement, localShape: localShape(value.shape, placement, TP_DEGREE) } : value,
  )
}

function onlyAllReduce({ phases }: PlacedGraph): PlacedNode {
  const [allReduce, ...others] = phases.flatMap((phase) => phase.allReduce ?? [])
  if (allReduce === undefined || others.length > 0) throw new Error('the example has one all-reduce')
  return allReduce
}

/** Every sum is replaced by the rank's own part. */
function skipAllReduce(graph: PlacedGraph): PlacedGraph {
  const { inputs, outputs } = onlyAllReduce(graph)
  const skipped = { ...graph, phases: graph.phases.map(({ nodes }): Phase => ({ nodes, allReduce: undefined })) }
  return replaceValues(skipped, (value) => inputs[outputs.indexOf(value)] ?? value)
}

/** Only the first of two values is summed. */
function skipOneSum(graph: PlacedGraph): PlacedGraph {
  const { inputs, outputs } = onlyAllReduce(graph)
  const phases = graph.phases.map(({ nodes, allReduce }) => ({
    nodes,
    allReduce:
      allReduce === undefined ? undefined : { ...allReduce, inputs: inputs.slice(0, 1), outputs: outputs.slice(0, 1) },
  }))
  return replaceValues({ ...graph, phases }, (value) => (value === outputs[1] ? (inputs[1] as PlacedValue) : value))
}

/** The sum is summed once more. */
function doubleAllReduce(graph: PlacedGraph): PlacedGraph {
  const { inputs, outputs } = onlyAllReduce(graph)
  const once = outputs.map((value, i) => ({ ...value, id: 10_000 + i }))
  const at = graph.phases.findIndex(({ allReduce }) => allReduce !== undefined)
  const node = (from: readonly PlacedValue[], to: readonly PlacedValue[]): PlacedNode => ({
    op: 'all_reduce',
    inputs: from,
    outputs: to,
    attributes: {},
    path: '',
  })
  const phases: Phase[] = [
    ...graph.phases.slice(0, at),
    { nodes: graph.phases[at]?.nodes ?? [], allReduce: node(inputs, once) },
    { nodes: [], allReduce: node(once, outputs) },
    ...graph.phases.slice(at + 1),
  ]
  return { ...graph, phases }
}

/** The bias behind the all-reduce is added by every rank before it. */
function addBiasPerRank(graph: PlacedGraph): PlacedGraph {
  const { inputs, outputs } = onlyAllReduce(graph)
  const [part, sum] = [inputs[0] as PlacedValue, outputs[0] as PlacedValue]
  const at = graph.phases.findIndex(({ allReduce }) => allReduce !== undefined)
  const [before, after] = [graph.phases[at] as Phase, graph.phases[at + 1] as Phase]
  const add = after.nodes.find((node) => node.op === 'add' && node.inputs[0] === sum) as PlacedNode
  const biased = { ...part, id: 10_000, placement: PARTIAL }
  const phases: Phase[] = [
    ...graph.phases.slice(0, at),
    {
      nodes: [...before.nodes, { ...add, inputs: [part, add.inputs[1] as PlacedValue], outputs: [biased] }],
      allReduce: { ...onlyAllReduce(graph), inputs: [biased], outputs: [add.outputs[0] as PlacedValue] },
    },
    { ...after, nodes: after.nodes.filter((node) => node !== add) },
  ]
  return { ...graph, phases }
}

/** Rows or columns of the weight moved by one, as if every slice began one too early. */
function shiftedBy(placement: Placement, weight: Float64Tensor): Float64Tensor {
  const slices = shardSlices(placement, 0, TP_DEGREE)
  if (slices === undefined) throw new Error('the weight is not sliced')
  const [rows, columns] = weight.shape as [number, number]
  const data = weight.data.map((_, i) => {
    const [row, column] = [Math.floor(i / columns), i % columns]
    const [from, other] = slices.dim === 0 ? [(row + 1) % rows, column] : [row, (column + 1) % columns]
    return weight.data[from * columns + other] as number
  })
  return new Tensor('float64', weight.shape, data)
}

describe('a wrong partition is noticed', () => {
  it('while the right ones are not', () => {
    for (const block of [attention(), joint(), new ParallelBlock(IMAGE), new SplitInputBlock(IMAGE)]) {
      const { graph, placed } = place(block)
      expect(findingOf(graph, placed)).toBeUndefined()
      const copied = replaceValues(placed, (value) => ({ ...value }))
      expect(findingOf(graph, copied)).toBeUndefined()
    }
  })

  const single = () => new ParallelBlock({ ...IMAGE, bias: false })

  it.each<[title: string, block: () => Block, mutate: (graph: PlacedGraph) => PlacedGraph, finding: string]>([
    ['an all-reduce is skipped', attention, skipAllReduce, 'values'],
    ['an all-reduce of two streams is skipped', joint, skipAllReduce, 'values'],
    ['one of two streams is not summed', joint, skipOneSum, 'values'],
    ['an all-reduce is done twice', attention, doubleAllReduce, 'values'],
    ['a bias is added by every rank', attention, addBiasPerRank, 'values'],
    ['a bias is added by every rank after a split input', () => new SplitInputBlock(IMAGE), addBiasPerRank, 'values'],
    [
      'blocks of a packed weight are forgotten',
      single,
      (graph) => misplaceWeight(graph, 'blocks.0.proj_in.weight', shard(0, [3 * WIDTH + 48])),
      'values',
    ],
    [
      'a block of a packed weight is dropped',
      single,
      (graph) => misplaceWeight(graph, 'blocks.0.proj_in.weight', shard(0, [2 * WIDTH, WIDTH, 24, 24])),
      'values',
    ],
    [
      'blocks of packed columns are forgotten',
      single,
      (graph) => misplaceWeight(graph, 'blocks.0.proj_out.weight', shard(1, [WIDTH + 24])),
      'values',
    ],
    [
      'rows are sliced instead of columns',
      attention,
      (graph) => misplaceWeight(graph, 'blocks.0.to_out.weight', shard(0, [WIDTH])),
      'OP_SHAPE',
    ],
    [
      'columns are sliced instead of rows',
      attention,
      (graph) => misplaceWeight(graph, 'blocks.0.to_q.weight', shard(1, [WIDTH])),
      'OP_SHAPE',
    ],
    [
      'a split weight is loaded whole',
      attention,
      (graph) => misplaceWeight(graph, 'blocks.0.to_out.weight', REPLICATED),
      'OP_SHAPE',
    ],
    [
      'the bias of a split weight is loaded whole',
      attention,
      (graph) => misplaceWeight(graph, 'blocks.0.to_q.bias', REPLICATED),
      'OP_SHAPE',
    ],
    [
      'a split bias has blocks of its own',
      attention,
      (graph) => misplaceWeight(graph, 'blocks.0.to_q.bias', shard(0, [4, 12])),
      'values',
    ],
  ])('%s', (_title, block, mutate, finding) => {
    const { graph, placed } = place(block())
    expect(findingOf(graph, mutate(placed))).toBe(finding)
  })

  it.each(['blocks.0.to_q.weight', 'blocks.0.to_out.weight'])('slices of %s begin one too early', (name) => {
    const { graph, placed } = place(attention())
    const placement = placed.parameters.find((value) => value.name === name)?.placement ?? REPLICATED
    const shifted = (weights: Weights) => ({
      ...weights,
      [name]: shiftedBy(placement, weights[name] as Float64Tensor),
    })
    expect(findingOf(graph, placed, shifted)).toBe('values')
  })
})

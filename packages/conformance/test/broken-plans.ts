import {
  type Graph,
  localShape,
  PARTIAL,
  type ParallelStyle,
  type ParameterPlacements,
  type Phase,
  type PlacedGraph,
  type PlacedNode,
  type PlacedValue,
  type Placement,
  packedColwise,
  packedRowwise,
  partition,
  REPLICATED,
  rmsNorm,
  shard,
  type TensorParallelPlan,
  type TracedTensor,
} from '@rankwise/core'
import { TINY_PLAN, TinyTransformer } from '../src/tiny-transformer.ts'

/** A plan that the model does not have. */
export interface BrokenPlan {
  readonly what: string
  readonly model: typeof TinyTransformer
}

function planned(what: string, change: Readonly<Record<string, ParallelStyle | undefined>>): BrokenPlan {
  const entries = Object.entries({ ...TINY_PLAN, ...change }).filter(([, style]) => style !== undefined)
  class Planned extends TinyTransformer {
    static override readonly tensorParallelPlan = Object.fromEntries(entries) as TensorParallelPlan
    static override fromConfig(): Planned {
      return new Planned()
    }
  }
  return { what, model: Planned }
}

/** Norms over all features that a rank holds: whole on one rank, half of them on two. */
class NormAcrossHeads extends TinyTransformer {
  static override fromConfig(): NormAcrossHeads {
    return new NormAcrossHeads()
  }

  constructor() {
    super()
    const { to_q } = this.double
    const forward = to_q.forward.bind(to_q)
    to_q.forward = (x: TracedTensor) => rmsNorm(forward(x), { eps: 1e-6 })
  }
}

/** Plans that are refused, or compute something else. */
export const BROKEN_PLANS: readonly BrokenPlan[] = [
  planned('colwise and rowwise swapped', { 'double.to_q': 'rowwise', 'double.to_out': 'colwise' }),
  planned('an output projection by columns', { 'double.to_out': 'colwise' }),
  planned('an output projection forgotten', { 'double.to_out': undefined }),
  planned('a query forgotten', { 'double.to_q': undefined }),
  planned('one stream forgotten', { 'double.add_qkv': undefined }),
  planned('q, k and v taken for one block', { 'double.add_qkv': 'colwise' }),
  planned('gate and up taken for one block', { 'double.ff.linear_in': 'colwise' }),
  planned('a block dropped', { 'single.proj_in': packedColwise([2, 2, 2, 3]) }),
  planned('blocks in another order', { 'single.proj_in': packedColwise([3, 3, 2, 2, 2]) }),
  planned('packed columns taken for one block', { 'single.proj_out': 'rowwise' }),
  planned('packed columns in another order', { 'single.proj_out': packedRowwise([3, 2]) }),
  planned('a split input taken for one that is split already', { mixer: 'rowwise' }),
  planned('a sharded output', { proj_out: 'colwise' }),
  planned('a key that names nothing', { 'double.to_x': 'colwise' }),
  { what: 'a norm across heads', model: NormAcrossHeads },
]

/** A way to split graphs that makes a mistake. */
export interface BrokenPartition {
  readonly what: string
  readonly partition: typeof partition
}

type Mutate = (graph: PlacedGraph) => PlacedGraph

const mistaken = (what: string, mutate: Mutate): BrokenPartition => ({
  what,
  partition: (graph: Graph, placements: ParameterPlacements, tpDegree: number) => {
    return mutate(partition(graph, placements, tpDegree))
  },
})

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

/** A weight is sliced otherwise than the operations expect. */
const misplaced =
  (name: string, placement: Placement): Mutate =>
  (graph) =>
    replaceValues(graph, (value) =>
      value.name === name
        ? { ...value, placement, localShape: localShape(value.shape, placement, graph.tpDegree) }
        : value,
    )

/** The phase that ends with the all-reduce of this index; negative ones count from the end. */
function phaseOf({ phases }: PlacedGraph, index: number): number {
  return [...phases.keys()].filter((at) => phases[at]?.allReduce !== undefined).at(index) as number
}

const skipped =
  (index: number): Mutate =>
  (graph) => {
    const at = phaseOf(graph, index)
    const { inputs, outputs } = (graph.phases[at] as Phase).allReduce as PlacedNode
    const phases = graph.phases.with(at, { ...(graph.phases[at] as Phase), allReduce: undefined })
    return replaceValues({ ...graph, phases }, (value) => inputs[outputs.indexOf(value)] ?? value)
  }

const doubled =
  (index: number): Mutate =>
  (graph) => {
    const at = phaseOf(graph, index)
    const { nodes, allReduce } = graph.phases[at] as Phase
    const { inputs, outputs } = allReduce as PlacedNode
    const once = outputs.map((value, i) => ({ ...value, id: 10_000 + i }))
    const sum = { op: 'all_reduce', attributes: {}, path: '' }
    return {
      ...graph,
      phases: [
        ...graph.phases.slice(0, at),
        { nodes, allReduce: { ...sum, inputs, outputs: once } },
        { nodes: [], allReduce: { ...sum, inputs: once, outputs } },
        ...graph.phases.slice(at + 1),
      ],
    }
  }

/** One of the values that share an exchange stays a part. */
const halfReduced: Mutate = (graph) => {
  const at = phaseOf(graph, 0)
  const { nodes, allReduce } = graph.phases[at] as Phase
  const { inputs, outputs } = allReduce as PlacedNode
  const fewer = { ...(allReduce as PlacedNode), inputs: inputs.slice(0, 1), outputs: outputs.slice(0, 1) }
  const phases = graph.phases.with(at, { nodes, allReduce: fewer })
  return replaceValues({ ...graph, phases }, (value) => (value === outputs[1] ? (inputs[1] as PlacedValue) : value))
}

/** The bias behind an all-reduce is added by every rank before it. */
const biasPerRank: Mutate = (graph) => {
  for (const [at, { nodes, allReduce }] of graph.phases.entries()) {
    const after = graph.phases[at + 1]
    for (const [i, sum] of (allReduce?.outputs ?? []).entries()) {
      const add = after?.nodes.find(
        ({ op, inputs }) => op === 'add' && inputs[0] === sum && inputs[1]?.kind === 'parameter',
      )
      if (add === undefined || after === undefined || allReduce === undefined) continue
      const part = allReduce.inputs[i] as PlacedValue
      const biased = { ...part, id: 10_000, placement: PARTIAL }
      return {
        ...graph,
        phases: graph.phases
          .with(at, {
            nodes: [...nodes, { ...add, inputs: [part, add.inputs[1] as PlacedValue], outputs: [biased] }],
            allReduce: {
              ...allReduce,
              inputs: allReduce.inputs.with(i, biased),
              outputs: allReduce.outputs.with(i, add.outputs[0] as PlacedValue),
            },
          })
          .with(at + 1, { ...after, nodes: after.nodes.filter((node) => node !== add) }),
      }
    }
  }
  return graph
}

/** Partitions that make a mistake. */
export const BROKEN_PARTITIONS: readonly BrokenPartition[] = [
  mistaken('the first all-reduce is skipped', skipped(0)),
  mistaken('the last all-reduce is skipped', skipped(-1)),
  mistaken('an all-reduce is done twice', doubled(1)),
  mistaken('one of two streams is not summed', halfReduced),
  mistaken('a bias is added by every rank', biasPerRank),
  mistaken('blocks of a packed weight are forgotten', misplaced('single.proj_in.weight', shard(0, [192]))),
  mistaken('a block of a packed weight is dropped', misplaced('single.proj_in.weight', shard(0, [64, 32, 48, 48]))),
  mistaken('blocks of packed columns are forgotten', misplaced('single.proj_out.weight', shard(1, [80]))),
  mistaken('rows are sliced instead of columns', misplaced('double.to_out.weight', shard(0, [32]))),
  mistaken('a split weight is loaded whole', misplaced('double.to_out.weight', REPLICATED)),
  mistaken('a split bias has blocks of its own', misplaced('double.to_q.bias', shard(0, [8, 24]))),
]

/** The way to make mistakes, which makes none by itself. */
export const UNBROKEN_PARTITION: BrokenPartition = mistaken('nothing', (graph) =>
  replaceValues(graph, (value) => ({ ...value })),
)

import { RankwiseError } from './errors.ts'
import type { Graph, Node, Value } from './graph.ts'
import { opDefinition, type PlacedType, PlacementContext } from './op.ts'
import { atDegree, formatPlacement, localShape, type Placement, REPLICATED } from './placement.ts'
import type { ParameterPlacements } from './plan.ts'
import type { Shape } from './tensor.ts'

/** A value and how it lies over the ranks. `shape` is that of the whole value. */
export interface PlacedValue extends Value {
  readonly placement: Placement
  /** What one rank holds. */
  readonly localShape: Shape
}

/** An operation whose operands and results have placements. */
export type PlacedNode = Node<PlacedValue>

/** The operations that a rank runs without talking to others, and the all-reduce that follows, if any. */
export interface Phase {
  readonly nodes: readonly PlacedNode[]
  readonly allReduce: PlacedNode | undefined
}

/** A graph with a placement for every value, cut at its all-reduces. */
export interface PlacedGraph {
  readonly name: string
  readonly tpDegree: number
  readonly inputs: readonly PlacedValue[]
  readonly parameters: readonly PlacedValue[]
  readonly constants: readonly PlacedValue[]
  readonly phases: readonly Phase[]
  readonly outputs: Readonly<Record<string, PlacedValue>>
  /** Names of the outputs that each rank keeps its own part of. */
  readonly retained: readonly string[]
}

/** Values that lie as runs before left them, or are left so for runs to come. */
export interface PartitionOptions {
  /** Placements of inputs by name. @default replicated */
  readonly inputs?: ReadonlyMap<string, Placement>
  /** Names of outputs that each rank keeps its own part of. @default none: outputs are whole on every rank */
  readonly retained?: readonly string[]
}

/**
 * Gives every value of a graph a placement, starting from those of the weights, and inserts the all-reduces.
 *
 * A partial value stays partial through linear operations and is summed only where one needs it whole. All partial
 * values that have to be summed at the same depth share one all-reduce: the graph is a row of phases, and every
 * operation runs in the first phase in which its operands are complete. So the number of exchanges is the length of
 * the longest chain of sums, whatever order the model's code has (FLUX.2: 2 per double block, 1 per single block).
 *
 * @throws RankwiseError `PLACEMENT_*` with the module path when an operation cannot run on its operands' placements
 */
export function partition(
  graph: Graph,
  placements: ParameterPlacements,
  tpDegree: number,
  options: PartitionOptions = {},
): PlacedGraph {
  return new Partitioner(graph, placements, tpDegree, options).run()
}

class Partitioner {
  readonly #graph: Graph
  readonly #placements: ParameterPlacements
  readonly #tpDegree: number
  readonly #options: PartitionOptions
  readonly #placed = new Map<Value, PlacedValue>()
  /** The sum of a partial value, once one operation has asked for it. */
  readonly #sums = new Map<PlacedValue, PlacedValue>()
  /** The first phase in which a value is there; 0 for what is given. */
  readonly #phaseOf = new Map<PlacedValue, number>()
  readonly #nodes: PlacedNode[][] = []
  readonly #partials: PlacedValue[][] = []
  #nextId = 0

  constructor(graph: Graph, placements: ParameterPlacements, tpDegree: number, options: PartitionOptions) {
    this.#graph = graph
    this.#placements = placements
    this.#tpDegree = tpDegree
    this.#options = options
  }

  run(): PlacedGraph {
    const { name, inputs, parameters, constants, nodes, outputs } = this.#graph
    for (const value of inputs) this.#place(value, this.#options.inputs?.get(value.name ?? '') ?? REPLICATED)
    for (const value of constants) this.#place(value, REPLICATED)
    for (const value of parameters) {
      this.#place(value, atDegree(this.#placements.get(value.name ?? '')?.placement ?? REPLICATED, this.#tpDegree))
    }
    for (const node of nodes) this.#visit(node)
    const complete = Object.entries(outputs).map(([key, value]) => [key, this.#complete(key, value)] as const)
    const phases = Array.from({ length: Math.max(this.#nodes.length, this.#partials.length) }, (_, i) => this.#phase(i))
    const all = (values: readonly Value[]) => values.map((value) => this.#valueOf(value))
    return {
      name,
      tpDegree: this.#tpDegree,
      inputs: all(inputs),
      parameters: all(parameters),
      constants: all(constants),
      phases,
      outputs: Object.fromEntries(complete),
      retained: this.#options.retained ?? [],
    }
  }

  #visit(node: Node): void {
    const inputs = node.inputs.map((value) => {
      const placed = this.#valueOf(value)
      return this.#sums.get(placed) ?? placed
    })
    const types = inputs.map((input, i) => this.#typeOf(input, i))
    const context = new PlacementContext(node.op, node.path, node.attributes, types, node.outputs, this.#tpDegree)
    const placements = opDefinition(node.op).place(context)
    const ready = inputs.map((input, i) => {
      const whole = context.reductions.has(i) ? this.#sum(input) : input
      const split = context.splits.get(i)
      return split === undefined ? whole : this.#split(whole, split, node.path)
    })
    const phase = Math.max(0, ...ready.map((input) => this.#phaseOf.get(input) ?? 0))
    const outputs = node.outputs.map((value, i) => this.#place(value, placements[i] ?? REPLICATED, phase))
    this.#append(phase, { ...node, inputs: ready, outputs })
  }

  #typeOf(value: PlacedValue, index: number): PlacedType {
    const splitInput = this.#placements.get(value.name ?? '')?.splitInput ?? false
    return { ...value, label: value.name ?? `input ${index}`, splitInput }
  }

  #append(phase: number, node: PlacedNode): void {
    this.#nodes[phase] ??= []
    this.#nodes[phase].push(node)
  }

  /** The sum of a partial value over the ranks; it is there one phase later. */
  #sum(value: PlacedValue): PlacedValue {
    const known = this.#sums.get(value)
    if (known !== undefined) return known
    const phase = this.#phaseOf.get(value) ?? 0
    const sum = this.#create(value, REPLICATED, phase + 1)
    this.#sums.set(value, sum)
    this.#partials[phase] ??= []
    this.#partials[phase].push(value)
    return sum
  }

  #split(value: PlacedValue, placement: Placement, path: string): PlacedValue {
    if (placement.kind !== 'shard') return value
    const phase = this.#phaseOf.get(value) ?? 0
    const { id, dtype, shape } = value
    const slice = this.#create({ id, dtype, shape, kind: 'result' }, placement, phase)
    const attributes = { dim: placement.dim, blocks: placement.blocks }
    this.#append(phase, { op: 'shard', inputs: [value], attributes, outputs: [slice], path })
    return slice
  }

  /** An output of the model is whole on every rank, unless the ranks keep their parts. */
  #complete(key: string, value: Value): PlacedValue {
    const placed = this.#valueOf(value)
    if (placed.placement.kind === 'partial') return this.#sum(placed)
    if (placed.placement.kind === 'replicated' || this.#options.retained?.includes(key)) return placed
    throw new RankwiseError('PLACEMENT_OUTPUT', `the output '${key}' is sharded`, {
      where: key,
      actual: { placement: formatPlacement(placed.placement), tpDegree: this.#tpDegree },
      rule: 'outputs of a model are whole on every rank',
      remedy: "complete the last sharded value with a 'rowwise' projection",
    })
  }

  #phase(index: number): Phase {
    const partials = this.#partials[index] ?? []
    const sums = partials.map((partial) => this.#sums.get(partial) as PlacedValue)
    const allReduce =
      partials.length === 0
        ? undefined
        : { op: 'all_reduce', inputs: partials, attributes: {}, outputs: sums, path: '' }
    return { nodes: this.#nodes[index] ?? [], allReduce }
  }

  #place(value: Value, placement: Placement, phase = 0): PlacedValue {
    const placed = this.#create(value, placement, phase)
    this.#placed.set(value, placed)
    return placed
  }

  #create(value: Value, placement: Placement, phase: number): PlacedValue {
    const placed = {
      ...value,
      id: this.#nextId++,
      placement,
      localShape: localShape(value.shape, placement, this.#tpDegree),
    }
    this.#phaseOf.set(placed, phase)
    return placed
  }

  #valueOf(value: Value): PlacedValue {
    const placed = this.#placed.get(value)
    if (placed === undefined) {
      throw new RankwiseError('GRAPH_ORDER', `value ${value.id} is used before it is computed`, {
        where: this.#graph.name,
      })
    }
    return placed
  }
}

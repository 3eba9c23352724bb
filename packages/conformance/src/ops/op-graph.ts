import {
  type Attributes,
  type DType,
  type Graph,
  type Node,
  opDefinition,
  partition,
  RankwiseError,
  type Segment,
  stepsOf,
  type TensorType,
  type Value,
} from '@rankwise/core'

/**
 * A graph of one operation, in a module called `module`.
 *
 * @param weights - indices of the operands that are parameters; the others are inputs. @default none
 * @throws RankwiseError `OP_UNKNOWN`, `OP_SHAPE`
 */
export function opGraph(
  op: string,
  operands: readonly TensorType[],
  attributes: Attributes,
  weights: readonly number[] = [],
): Graph {
  const values = operands.map(({ dtype, shape }, id): Value => {
    return { id, kind: weights.includes(id) ? 'parameter' : 'input', dtype, shape, name: String(id) }
  })
  const outputs = opDefinition(op)
    .infer(values, attributes)
    .map(({ dtype, shape }, i): Value => ({ id: values.length + i, kind: 'result', dtype, shape }))
  return {
    name: op,
    inputs: values.filter(({ kind }) => kind === 'input'),
    parameters: values.filter(({ kind }) => kind === 'parameter'),
    constants: [],
    nodes: [{ op, inputs: values, attributes, outputs, path: 'module' }],
    outputs: Object.fromEntries(outputs.map((value, i) => [String(i), value])),
  }
}

/** The graph with every result cast, by operations that follow those of the graph. */
export function castResults(graph: Graph, dtype: DType): Graph {
  const nodes = Object.values(graph.outputs).map((value): Node => {
    const cast: Value = { id: -1 - value.id, kind: 'result', dtype, shape: value.shape }
    return { op: 'cast', inputs: [value], attributes: { dtype }, outputs: [cast], path: 'cast' }
  })
  return {
    ...graph,
    nodes: [...graph.nodes, ...nodes],
    outputs: Object.fromEntries(nodes.flatMap(({ outputs }, i) => [[String(i), outputs[0] as Value]])),
  }
}

/** The only segment of a graph on one rank. @throws RankwiseError `GRAPH_SEGMENTS` when it is not one segment */
export function segmentOf(graph: Graph): Segment {
  const [step, ...others] = stepsOf(partition(graph, new Map(), 1), 0)
  if (step?.kind === 'segment' && others.length === 0) return step.segment
  throw new RankwiseError('GRAPH_SEGMENTS', 'the graph is not one segment', { where: graph.name })
}

import {
  type Attributes,
  type Graph,
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

/** The only segment of a graph on one rank. @throws RankwiseError `GRAPH_SEGMENTS` when it is not one segment */
export function segmentOf(graph: Graph): Segment {
  const [step, ...others] = stepsOf(partition(graph, new Map(), 1), 0)
  if (step?.kind === 'segment' && others.length === 0) return step.segment
  throw new RankwiseError('GRAPH_SEGMENTS', 'the graph is not one segment', { where: graph.name })
}

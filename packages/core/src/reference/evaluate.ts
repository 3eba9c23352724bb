import { RankwiseError } from '../errors.ts'
import type { Graph, Node, Value } from '../graph.ts'
import { opDefinition } from '../op.ts'
import '../ops/index.ts'
import { sameShape, type Tensor } from '../tensor.ts'
import type { Float64Tensor } from './kernel.ts'
import { referenceOp } from './reference-op.ts'

/** Tensors by the id of the value they are of. */
export type Values = Map<number, Float64Tensor>

/**
 * Runs a traced graph in float64 as the one rank that holds everything: what its forward computes, and so what every
 * partition of it has to compute.
 *
 * @param weights - whole weights by name
 * @param inputs - by name, of the traced shapes
 * @throws RankwiseError `WEIGHTS_MISSING`, `WEIGHTS_SHAPE`, `INPUT_MISMATCH`, `OP_SHAPE`, `REFERENCE_SHAPE`
 */
export function runGraph(
  graph: Graph,
  weights: Readonly<Record<string, Tensor>>,
  inputs: Readonly<Record<string, Tensor>>,
): Record<string, Float64Tensor> {
  const values: Values = new Map()
  for (const value of graph.inputs) values.set(value.id, inputOf(value, inputs))
  for (const value of graph.parameters) values.set(value.id, weightOf(value, weights))
  for (const value of graph.constants) values.set(value.id, constantOf(value))
  for (const node of graph.nodes) evaluate(node, values)
  return outputsOf(graph.outputs, values)
}

/**
 * Computes a node from `values` and adds its results to them.
 *
 * @throws RankwiseError `OP_SHAPE` when operands do not go together, `REFERENCE_SHAPE` when a result has another shape
 *   than the graph says
 */
export function evaluate(node: Node, values: Values): void {
  const inputs = node.inputs.map((input) => tensorOf(values, input))
  const types = inputs.map(({ shape }, i) => ({ shape, dtype: node.inputs[i]?.dtype ?? 'float64' }))
  opDefinition(node.op).infer(types, node.attributes)
  const results = referenceOp(node.op, inputs, node.attributes)
  for (const [i, output] of node.outputs.entries()) {
    const result = results[i]
    if (result === undefined || !sameShape(result.shape, output.shape)) {
      throw new RankwiseError('REFERENCE_SHAPE', `${node.op} computes another shape than the graph says`, {
        where: node.path || '(model)',
        actual: { computed: result?.shape ?? 'nothing', graph: output.shape },
        rule: "an operation's infer and localize rules give the shapes that it computes",
      })
    }
    values.set(output.id, result)
  }
}

export function outputsOf(outputs: Readonly<Record<string, Value>>, values: Values): Record<string, Float64Tensor> {
  return Object.fromEntries(Object.entries(outputs).map(([name, value]) => [name, tensorOf(values, value)]))
}

/** @throws RankwiseError `INPUT_MISMATCH` */
export function inputOf(value: Value, inputs: Readonly<Record<string, Tensor>>): Float64Tensor {
  const name = value.name ?? ''
  const tensor = inputs[name]
  if (tensor === undefined || !sameShape(tensor.shape, value.shape)) {
    throw new RankwiseError('INPUT_MISMATCH', `the input '${name}' does not fit the traced graph`, {
      where: name,
      actual: { given: tensor?.shape ?? 'nothing', traced: value.shape },
      rule: 'inputs have the shape they were traced with',
    })
  }
  return tensor.cast('float64')
}

/** A whole weight. @throws RankwiseError `WEIGHTS_MISSING`, `WEIGHTS_SHAPE` */
export function weightOf(value: Value, weights: Readonly<Record<string, Tensor>>): Float64Tensor {
  const name = value.name ?? ''
  const weight = weights[name]
  if (weight === undefined) throw new RankwiseError('WEIGHTS_MISSING', 'the weight is not given', { where: name })
  if (!sameShape(weight.shape, value.shape)) {
    throw new RankwiseError('WEIGHTS_SHAPE', 'the weight has another shape than the model', {
      where: name,
      actual: { given: weight.shape, model: value.shape },
      rule: 'weights are given whole; ranks slice them',
    })
  }
  return weight.cast('float64')
}

/** @throws RankwiseError `CONSTANT_MISSING` */
export function constantOf({ id, data }: Value): Float64Tensor {
  if (data === undefined) throw new RankwiseError('CONSTANT_MISSING', `the constant ${id} has no data`)
  return data.cast('float64')
}

/** @throws RankwiseError `GRAPH_ORDER` */
export function tensorOf(values: Values, { id }: Value): Float64Tensor {
  const tensor = values.get(id)
  if (tensor === undefined) throw new RankwiseError('GRAPH_ORDER', `value ${id} is used before it is computed`)
  return tensor
}

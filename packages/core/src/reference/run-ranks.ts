import { RankwiseError } from '../errors.ts'
import type { Value } from '../graph.ts'
import type { PlacedGraph } from '../partition.ts'
import { type Segment, type Step, stepsOf } from '../segment.ts'
import type { Tensor } from '../tensor.ts'
import { constantOf, evaluate, inputOf, outputsOf, tensorOf, type Values, weightOf } from './evaluate.ts'
import type { Float64Tensor } from './kernel.ts'
import { shardTensor } from './shard-tensor.ts'

/**
 * Runs a placed graph in float64 on all its ranks, in this process: what `tpDegree` processes would compute, without a
 * backend or collectives. Every rank slices the whole weights for itself, runs its own segments, and partial values are
 * added in rank order. Meant for tests of a model's plan and for debugging.
 *
 * @param weights - whole weights by name
 * @param inputs - by name, of the traced shapes
 * @returns the outputs of every rank
 * @throws RankwiseError `WEIGHTS_MISSING`, `WEIGHTS_SHAPE`, `INPUT_MISMATCH`, `OP_SHAPE`, `REFERENCE_SHAPE`,
 *   `BLOCK_NOT_DIVISIBLE`
 */
export function runRanks(
  graph: PlacedGraph,
  weights: Readonly<Record<string, Tensor>>,
  inputs: Readonly<Record<string, Tensor>>,
): readonly Record<string, Float64Tensor>[] {
  const ranks = Array.from({ length: graph.tpDegree }, (_, rank) => startRank(graph, weights, inputs, rank))
  // All ranks have the same kinds of steps in the same order, so they can take turns.
  for (const [i] of (ranks[0]?.steps ?? []).entries()) runStep(ranks, i)
  return ranks.map(({ values }) => outputsOf(graph.outputs, values))
}

interface Rank {
  readonly steps: readonly Step[]
  readonly values: Values
}

function startRank(
  graph: PlacedGraph,
  weights: Readonly<Record<string, Tensor>>,
  inputs: Readonly<Record<string, Tensor>>,
  rank: number,
): Rank {
  const values: Values = new Map()
  for (const value of graph.inputs) values.set(value.id, inputOf(value, inputs))
  for (const value of graph.constants) values.set(value.id, constantOf(value))
  for (const value of graph.parameters) {
    values.set(value.id, shardTensor(weightOf(value, weights), value.placement, rank, graph.tpDegree))
  }
  return { steps: stepsOf(graph, rank), values }
}

function runStep(ranks: readonly Rank[], index: number): void {
  const steps = ranks.map(({ steps }) => steps[index])
  for (const [rank, step] of steps.entries()) {
    if (step?.kind === 'segment') runSegment(step.segment, (ranks[rank] as Rank).values)
  }
  const [step] = steps
  if (step?.kind === 'all_reduce') allReduce(ranks, step.inputs, step.outputs)
}

/** A rank keeps only the outputs that the segment declares, so that a missing one is noticed. */
function runSegment(segment: Segment, values: Values): void {
  const local: Values = new Map()
  for (const value of [...segment.inputs, ...segment.parameters, ...segment.constants]) {
    local.set(value.id, tensorOf(values, value))
  }
  for (const node of segment.nodes) evaluate(node, local)
  for (const output of segment.outputs) values.set(output.id, tensorOf(local, output))
}

function allReduce(ranks: readonly Rank[], inputs: readonly Value[], outputs: readonly Value[]): void {
  for (const [i, output] of outputs.entries()) {
    const sum = sumInOrder(ranks.map(({ values }) => tensorOf(values, inputs[i] as Value)))
    for (const { values } of ranks) values.set(output.id, sum)
  }
}

function sumInOrder(parts: readonly Float64Tensor[]): Float64Tensor {
  const [first, ...others] = parts
  if (first === undefined) throw new RankwiseError('TP_DEGREE_INVALID', 'there is no rank to sum over')
  const sum = first.clone()
  for (const { data } of others) {
    for (let i = 0; i < data.length; i++) sum.data[i] = (sum.data[i] as number) + (data[i] as number)
  }
  return sum
}

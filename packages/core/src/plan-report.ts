import { opDefinition } from './op.ts'
import type { PlacedGraph, PlacedNode, PlacedValue } from './partition.ts'
import { sizeOf } from './tensor.ts'

/** What a placed graph costs one rank, counted in elements and operations: nothing is measured. */
export interface PlanReport {
  readonly tpDegree: number
  /** Elements of all weights. */
  readonly fullWeights: number
  /** Elements of the weights that one rank holds. */
  readonly localWeights: number
  /** Elements of the weights that every rank holds whole. */
  readonly replicatedWeights: number
  /** Exchanges in one forward; one rank alone has none. */
  readonly allReduces: number
  /** Elements that a rank contributes to all exchanges of one forward. */
  readonly allReduceElements: number
  /** Floating-point operations of one forward on one rank. */
  readonly flops: number
  /** Largest number of elements that are alive at once on a rank, weights not counted. */
  readonly peakActivations: number
}

/** Counts what `partition` decided. */
export function planReport(graph: PlacedGraph): PlanReport {
  const { parameters, phases, tpDegree } = graph
  const elements = (values: readonly PlacedValue[]) => values.reduce((sum, value) => sum + sizeOf(value.localShape), 0)
  const exchanges = tpDegree === 1 ? [] : phases.flatMap(({ allReduce }) => allReduce ?? [])
  return {
    tpDegree,
    fullWeights: parameters.reduce((sum, { shape }) => sum + sizeOf(shape), 0),
    localWeights: elements(parameters),
    replicatedWeights: elements(parameters.filter(({ placement }) => placement.kind === 'replicated')),
    allReduces: exchanges.length,
    allReduceElements: elements(exchanges.flatMap(({ inputs }) => inputs)),
    flops: phases.flatMap(({ nodes }) => nodes).reduce((sum, node) => sum + flopsOf(node), 0),
    peakActivations: peakActivations(graph),
  }
}

function flopsOf(node: PlacedNode): number {
  const local = (value: PlacedValue) => ({ dtype: value.dtype, shape: value.localShape })
  return opDefinition(node.op).cost(node.inputs.map(local), node.outputs.map(local), node.attributes).flops
}

/** Values live from the operation that computes them to the last one that reads them. */
function peakActivations({ inputs, phases, outputs }: PlacedGraph): number {
  const nodes = phases.flatMap((phase) =>
    phase.allReduce === undefined ? phase.nodes : [...phase.nodes, phase.allReduce],
  )
  const lastUse = new Map<PlacedValue, number>()
  for (const [i, node] of nodes.entries()) for (const input of node.inputs) lastUse.set(input, i)
  for (const output of Object.values(outputs)) lastUse.set(output, nodes.length)
  let alive = inputs.reduce((sum, input) => sum + sizeOf(input.localShape), 0)
  let peak = alive
  for (const [i, node] of nodes.entries()) {
    alive += node.outputs.reduce((sum, output) => sum + sizeOf(output.localShape), 0)
    peak = Math.max(peak, alive)
    for (const value of new Set([...node.inputs, ...node.outputs])) {
      const ends = (lastUse.get(value) ?? i) <= i
      if (ends && (value.kind === 'result' || value.kind === 'input')) alive -= sizeOf(value.localShape)
    }
  }
  return peak
}

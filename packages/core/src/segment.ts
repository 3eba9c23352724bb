import { createHash } from 'node:crypto'
import type { Attributes, Node, Value } from './graph.ts'
import { opDefinition, type PlacedType } from './op.ts'
import type { PlacedGraph, PlacedNode, PlacedValue } from './partition.ts'

/** What one rank runs between two all-reduces. Shapes and attributes are local; placements are gone. */
export interface Segment {
  readonly inputs: readonly Value[]
  readonly parameters: readonly Value[]
  readonly constants: readonly Value[]
  readonly nodes: readonly Node[]
  readonly outputs: readonly Value[]
  /** Equal for segments that differ only in which weights they take. */
  readonly key: string
}

/** One step of a rank: a segment, or an all-reduce of values by id. */
export type Step =
  | { readonly kind: 'segment'; readonly segment: Segment }
  | { readonly kind: 'all_reduce'; readonly inputs: readonly Value[]; readonly outputs: readonly Value[] }

/** The steps of one rank, in order. */
export function stepsOf(graph: PlacedGraph, rank: number): readonly Step[] {
  const steps: Step[] = []
  for (const [i, { nodes, allReduce }] of graph.phases.entries()) {
    const needed = neededAfter(graph, i)
    if (nodes.length > 0) steps.push({ kind: 'segment', segment: localSegment(nodes, needed, rank, graph.tpDegree) })
    if (allReduce !== undefined) {
      steps.push({
        kind: 'all_reduce',
        inputs: allReduce.inputs.map(localValue),
        outputs: allReduce.outputs.map(localValue),
      })
    }
  }
  return steps
}

/** Values that are used after the operations of a phase: by its all-reduce, by later phases, or as results. */
function neededAfter({ phases, outputs }: PlacedGraph, phase: number): ReadonlySet<PlacedValue> {
  const later = phases
    .slice(phase + 1)
    .flatMap(({ nodes, allReduce }) => [...nodes.flatMap((node) => node.inputs), ...(allReduce?.inputs ?? [])])
  return new Set([...(phases[phase]?.allReduce?.inputs ?? []), ...later, ...Object.values(outputs)])
}

function localSegment(
  placedNodes: readonly PlacedNode[],
  needed: ReadonlySet<PlacedValue>,
  rank: number,
  tpDegree: number,
): Segment {
  const produced = new Set(placedNodes.flatMap((node) => node.outputs))
  const used = [...new Set(placedNodes.flatMap((node) => node.inputs))]
  const of = (...kinds: readonly Value['kind'][]) =>
    used.filter((value) => kinds.includes(value.kind) && !produced.has(value)).map(localValue)
  const parts = {
    inputs: of('input', 'result'),
    parameters: of('parameter'),
    constants: of('constant'),
    nodes: placedNodes.map((node) => localNode(node, rank, tpDegree)),
    outputs: [...produced].filter((value) => needed.has(value)).map(localValue),
  }
  return { ...parts, key: structuralKey(parts) }
}

function localValue({ id, kind, dtype, localShape, name, data }: PlacedValue): Value {
  return {
    id,
    kind,
    dtype,
    shape: localShape,
    ...(name === undefined ? {} : { name }),
    ...(data === undefined ? {} : { data }),
  }
}

function localNode(node: PlacedNode, rank: number, tpDegree: number): Node {
  return {
    op: node.op,
    inputs: node.inputs.map(localValue),
    attributes: localAttributes(node, rank, tpDegree),
    outputs: node.outputs.map(localValue),
    path: node.path,
  }
}

function localAttributes(node: PlacedNode, rank: number, tpDegree: number): Attributes {
  const localize = opDefinition(node.op).localize
  if (localize === undefined) return node.attributes
  const typed = (value: PlacedValue): PlacedType => ({ ...value, label: value.name ?? '' })
  return localize(node.attributes, { rank, tpDegree, inputs: node.inputs.map(typed), outputs: node.outputs.map(typed) })
}

/** Unlike JSON, tells infinities, NaN and -0 apart. */
function formatAttributes(attributes: Attributes): string {
  return Object.entries(attributes)
    .map(([name, value]) => `${name}=${Object.is(value, -0) ? '-0' : String(value)}`)
    .join(' ')
}

/** A hash of everything but names and ids. */
function structuralKey({ inputs, parameters, constants, nodes, outputs }: Omit<Segment, 'key'>): string {
  const hash = createHash('sha256')
  const numbers = new Map<number, number>()
  const declare = (role: string, value: Value) => {
    numbers.set(value.id, numbers.size)
    hash.update(`${role} ${value.dtype}[${value.shape.join()}];`)
  }
  // An argument of the model and the result of an earlier segment are the same to a segment.
  for (const value of inputs) declare('input', value)
  for (const value of parameters) declare('parameter', value)
  for (const value of constants) {
    declare('constant', value)
    const data = value.data?.data
    if (data !== undefined) hash.update(new Uint8Array(data.buffer, data.byteOffset, data.byteLength))
  }
  for (const node of nodes) {
    hash.update(
      `${node.op} ${node.inputs.map((value) => numbers.get(value.id)).join()} ${formatAttributes(node.attributes)}:`,
    )
    for (const value of node.outputs) declare('result', value)
  }
  hash.update(`out ${outputs.map((value) => numbers.get(value.id)).join()}`)
  return hash.digest('hex')
}

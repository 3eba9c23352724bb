import type { Attributes } from './graph.ts'
import type { PlacedGraph, PlacedNode, PlacedValue } from './partition.ts'
import { formatPlacement } from './placement.ts'

/**
 * A placed graph as text: one line per operation with the type and placement of its result, cut at the all-reduces.
 * The text is stable: equal graphs print equal lines.
 */
export function printGraph(graph: PlacedGraph): string {
  const names = new Names()
  const lines = [`graph ${graph.name} tp=${graph.tpDegree}`]
  for (const value of graph.inputs) lines.push(`  input ${names.of(value)}: ${formatType(value)}`)
  for (const [i, { nodes, allReduce }] of graph.phases.entries()) {
    lines.push(`segment ${i}`)
    for (const node of nodes) lines.push(`  ${formatNode(node, names)}`)
    if (allReduce !== undefined) lines.push(formatNode(allReduce, names))
  }
  for (const [key, value] of Object.entries(graph.outputs)) lines.push(`output ${key} = ${names.of(value)}`)
  return `${lines.join('\n')}\n`
}

/** Results are numbered in the order of printing. */
class Names {
  readonly #numbers = new Map<PlacedValue, number>()

  of(value: PlacedValue): string {
    if (value.kind === 'parameter') return value.name ?? '?'
    if (value.kind === 'input') return `%${value.name}`
    if (value.kind === 'constant') return `const[${value.shape.join(', ')}]`
    const known = this.#numbers.get(value) ?? this.#numbers.size
    this.#numbers.set(value, known)
    return `%${known}`
  }
}

function formatNode(node: PlacedNode, names: Names): string {
  const inputs = node.inputs.map((value) => names.of(value)).join(', ')
  const outputs = node.outputs.map((value) => `${names.of(value)}: ${formatType(value)}`).join(', ')
  const path = node.path === '' ? '' : `  # ${node.path}`
  return `${outputs} = ${node.op}(${inputs})${formatAttributes(node.attributes)}${path}`
}

function formatType({ dtype, shape, placement }: PlacedValue): string {
  return `${dtype}[${shape.join(', ')}] ${formatPlacement(placement)}`
}

function formatAttributes(attributes: Attributes): string {
  const entries = Object.entries(attributes).map(([name, value]) => `${name}=${formatAttribute(value)}`)
  return entries.length === 0 ? '' : ` {${entries.join(', ')}}`
}

function formatAttribute(value: Attributes[string]): string {
  return Array.isArray(value) ? `[${value.join(', ')}]` : String(value)
}

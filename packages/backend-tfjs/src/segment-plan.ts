import { type Node, RankwiseError, type Segment, type Value } from '@rankwise/core'
import { computeDType, type DTypes, valueDType } from './device-dtype.ts'
import type { Rule, Rules } from './lowering/rule.ts'

/** A node that is to run. */
export interface PlannedNode {
  readonly node: Node
  readonly rule: Rule
  /** Ids of values that nothing reads any more once it has run. */
  readonly released: readonly number[]
}

/** What a segment needs to run, checked. */
export interface SegmentPlan {
  readonly segment: Segment
  /** Those whose results are needed. */
  readonly nodes: readonly PlannedNode[]
}

/** @throws RankwiseError `OP_UNSUPPORTED` with the module path, `DTYPE_UNSUPPORTED`, `CONSTANT_MISSING` */
export function planSegment(segment: Segment, rules: Rules, engine: DTypes): SegmentPlan {
  for (const [i, { name = `input ${i}`, dtype }] of segment.inputs.entries()) valueDType(dtype, name, engine)
  for (const [i, { name = `parameter ${i}`, dtype }] of segment.parameters.entries()) {
    computeDType(dtype, name, engine)
  }
  for (const { id, dtype, data } of segment.constants) {
    valueDType(dtype, `constant ${id}`, engine)
    if (data === undefined) throw new RankwiseError('CONSTANT_MISSING', `the constant ${id} has no data`)
  }
  const needed = neededNodes(segment)
  const lastUses = lastUsesOf(segment, needed)
  const nodes = segment.nodes.map((node) => ({ node, rule: ruleOf(node, rules, engine) }))
  return {
    segment,
    nodes: nodes
      .filter(({ node }) => needed.includes(node))
      .map(({ node, rule }) => ({ node, rule, released: lastUses.get(node) ?? [] })),
  }
}

function ruleOf({ op, path, outputs }: Node, rules: Rules, engine: DTypes): Rule {
  const where = path || '(model)'
  for (const { dtype } of outputs) valueDType(dtype, where, engine)
  const rule = Object.hasOwn(rules, op) ? rules[op] : undefined
  if (rule !== undefined) return rule
  throw new RankwiseError('OP_UNSUPPORTED', `the backend tfjs has no rule for the operation '${op}'`, {
    where,
    actual: { op, supported: Object.keys(rules).join(' ') },
  })
}

/** The nodes that the outputs depend on, in order. */
function neededNodes({ nodes, outputs }: Segment): readonly Node[] {
  const needed = new Set(outputs.map(({ id }) => id))
  const used = nodes.toReversed().filter((node) => {
    if (!node.outputs.some(({ id }) => needed.has(id))) return false
    for (const { id } of node.inputs) needed.add(id)
    return true
  })
  return used.toReversed()
}

/** For every node, the results that it is the last to read, or that nothing reads. */
function lastUsesOf({ outputs }: Segment, nodes: readonly Node[]): ReadonlyMap<Node, readonly number[]> {
  const kept = new Set(outputs.map(({ id }) => id))
  const lastUse = new Map<number, Node>()
  for (const node of nodes) {
    for (const { id } of node.outputs) lastUse.set(id, node)
    for (const { id, kind } of node.inputs as readonly Value[]) if (kind === 'result') lastUse.set(id, node)
  }
  const released = new Map<Node, number[]>()
  for (const [id, node] of lastUse) {
    if (!kept.has(id)) released.set(node, [...(released.get(node) ?? []), id])
  }
  return released
}

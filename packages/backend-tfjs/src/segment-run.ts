import { setImmediate } from 'node:timers/promises'
import { allocate, type Node, opDefinition, RankwiseError, sameShape, sizeOf, type Value } from '@rankwise/core'
import { elementDType } from './device-dtype.ts'
import type { TfjsTensor } from './device-tensor.ts'
import type { Engine, Ref } from './engine.ts'
import { valueOperand, WeightOperand } from './lowering/operand.ts'
import type { Operand } from './lowering/rule.ts'
import type { PlannedNode, SegmentPlan } from './segment-plan.ts'

/** Milliseconds after which others in this process get a turn: sockets, timers, signals. */
const TURN_MILLISECONDS = 20

/** What a run reads, in the order of the segment. */
export interface RunArguments {
  readonly inputs: readonly TfjsTensor[]
  readonly parameters: readonly TfjsTensor[]
  readonly constants: readonly Ref[]
}

/** One run of a segment, node by node. A value is freed as soon as nothing reads it any more. */
export class SegmentRun {
  readonly #engine: Engine
  readonly #plan: SegmentPlan
  readonly #operands = new Map<number, Operand>()
  /** What this run made and has not freed. */
  readonly #results = new Map<number, Ref>()

  constructor(engine: Engine, plan: SegmentPlan, { inputs, parameters, constants }: RunArguments) {
    this.#engine = engine
    this.#plan = plan
    const { segment } = plan
    for (const [i, value] of segment.inputs.entries()) {
      this.#operands.set(value.id, valueOperand(value, (inputs[i] as TfjsTensor).stored.ref))
    }
    for (const [i, value] of segment.parameters.entries()) {
      this.#operands.set(value.id, new WeightOperand(engine, value, (parameters[i] as TfjsTensor).stored))
    }
    for (const [i, value] of segment.constants.entries()) {
      this.#operands.set(value.id, valueOperand(value, constants[i] as Ref))
    }
  }

  /** The segment's outputs, each a tensor of its own. @throws RankwiseError `TFJS_RUN`, `TFJS_SHAPE`, `EMBEDDING_ID` */
  async run(): Promise<readonly Ref[]> {
    try {
      let turn = performance.now()
      for (const planned of this.#plan.nodes) {
        this.#step(planned)
        if (performance.now() - turn < TURN_MILLISECONDS) continue
        await setImmediate()
        turn = performance.now()
      }
      return this.#outputs()
    } finally {
      for (const ref of this.#results.values()) this.#engine.free(ref)
    }
  }

  #step({ node, rule, released }: PlannedNode): void {
    const results = this.#compute(node, rule)
    for (const [i, value] of node.outputs.entries()) {
      const ref = results[i] as Ref
      this.#results.set(value.id, ref)
      this.#operands.set(value.id, valueOperand(value, ref))
    }
    for (const [i, value] of node.outputs.entries()) requireShape(node, value, results[i] as Ref)
    for (const id of released) this.#release(id)
  }

  #compute(node: Node, rule: PlannedNode['rule']): readonly Ref[] {
    const engine = this.#engine
    try {
      return engine.tidy(() => {
        // Not all kernels take tensors without elements; what has none needs no kernel.
        if (node.outputs.every(({ shape }) => sizeOf(shape) === 0))
          return node.outputs.map((value) => this.#empty(value))
        const inputs = node.inputs.map(({ id }) => this.#operand(id))
        const results = rule({ engine, attributes: node.attributes as never, outputs: node.outputs }, ...inputs)
        if (opDefinition(node.op).movesOnly === true) return results
        return results.map((ref, i) => (node.outputs[i]?.dtype === 'bfloat16' ? engine.roundToBfloat16(ref) : ref))
      })
    } catch (cause) {
      throw failure(node, cause)
    }
  }

  #outputs(): readonly Ref[] {
    return this.#plan.segment.outputs.map((value) => {
      const own = this.#results.get(value.id)
      if (own === undefined) return this.#copyOf(value)
      this.#results.delete(value.id)
      return own
    })
  }

  /** Of an input, a constant, or a result that is an output already. */
  #copyOf(value: Value): Ref {
    const { ref } = this.#operand(value.id)
    return this.#engine.tidy(() => [this.#engine.reshape(ref, value.shape)])[0] as Ref
  }

  #empty({ dtype, shape }: Value): Ref {
    const type = elementDType(dtype)
    return this.#engine.write(type, shape, allocate(type, 0))
  }

  #operand(id: number): Operand {
    const operand = this.#operands.get(id)
    if (operand === undefined) throw new RankwiseError('GRAPH_ORDER', `value ${id} is used before it is computed`)
    return operand
  }

  #release(id: number): void {
    const ref = this.#results.get(id)
    this.#results.delete(id)
    this.#operands.delete(id)
    if (ref !== undefined) this.#engine.free(ref)
  }
}

function requireShape({ op, path }: Node, { shape }: Value, ref: Ref): void {
  if (sameShape(ref.shape, shape)) return
  throw new RankwiseError('TFJS_SHAPE', `${op} computes another shape than the graph says`, {
    where: path || '(model)',
    actual: { computed: ref.shape, graph: shape },
  })
}

/** An error that says which operation of which module failed. */
function failure({ op, path }: Node, cause: unknown): RankwiseError {
  const where = path || '(model)'
  if (cause instanceof RankwiseError) {
    const { code, actual, rule, remedy } = cause
    const [what = ''] = cause.message.slice(`[${code}] `.length).split('\n')
    return new RankwiseError(code, what, { where, actual, ...(rule && { rule }), ...(remedy && { remedy }), cause })
  }
  const message = cause instanceof Error ? cause.message : String(cause)
  return new RankwiseError('TFJS_RUN', `TensorFlow.js failed in ${op}: ${message}`, { where, cause })
}

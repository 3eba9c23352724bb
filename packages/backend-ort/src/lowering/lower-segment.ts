import { type Node, RankwiseError, type Segment, sizeOf, type Value } from '@rankwise/core'
import { hostDType } from '../host-dtype.ts'
import type { OnnxModel, OnnxValueInfo } from '../onnx/model.ts'
import { OnnxBuilder } from '../onnx/onnx-builder.ts'
import { attentionRules } from './attention.ts'
import { elementwiseRules } from './elementwise.ts'
import { linearRules } from './linear.ts'
import { movementRules } from './movement.ts'
import { normRules } from './norm.ts'
import type { LoweringRule, LoweringRules, Result } from './rule.ts'
import { spatialRules } from './spatial.ts'

/** How every operation of `@rankwise/core` but `all_reduce` runs on ORT; that one never reaches a backend. */
export const LOWERING_RULES: LoweringRules = {
  ...elementwiseRules,
  ...linearRules,
  ...movementRules,
  ...normRules,
  ...attentionRules,
  ...spatialRules,
}

/**
 * A segment as an ONNX graph. Its inputs are the segment's inputs, then its parameters; its outputs are the segment's,
 * in their order.
 *
 * @throws RankwiseError `OP_UNSUPPORTED` with the module path, `DTYPE_UNSUPPORTED`
 */
export function lowerSegment(segment: Segment, rules: LoweringRules = LOWERING_RULES): OnnxModel {
  return new SegmentLowering(segment, rules).run()
}

class SegmentLowering {
  readonly #segment: Segment
  readonly #rules: LoweringRules
  readonly #onnx = new OnnxBuilder()
  /** Where the value with an id is in the ONNX graph. */
  readonly #names = new Map<number, string>()
  readonly #used: ReadonlySet<number>

  constructor(segment: Segment, rules: LoweringRules) {
    this.#segment = segment
    this.#rules = rules
    this.#used = usedValues(segment)
  }

  run(): OnnxModel {
    const { inputs, parameters, constants, nodes, outputs, key } = this.#segment
    this.#declare('input', inputs)
    this.#declare('parameter', parameters)
    for (const value of constants) this.#names.set(value.id, this.#constant(value))
    for (const node of nodes) this.#lower(node)
    return this.#onnx.build(key, this.#outputs(outputs))
  }

  #declare(kind: string, values: readonly Value[]): void {
    for (const [i, value] of values.entries()) {
      this.#names.set(value.id, this.#onnx.input(valueInfo(value, `${kind}_${i}`)))
    }
  }

  #constant({ id, dtype, shape, data }: Value): string {
    if (data === undefined) throw new RankwiseError('CONSTANT_MISSING', `the constant ${id} has no data`)
    return this.#onnx.constant(hostDType(dtype, `constant ${id}`), shape, data.data)
  }

  #lower(node: Node): void {
    const rule = this.#rule(node)
    const outputs = node.outputs.map((value) => ({ ...value, isUsed: this.#used.has(value.id) }))
    if (!outputs.some(({ isUsed }) => isUsed)) return
    const names = this.#onnx.within(node.path, () => this.#emit(rule, node, outputs))
    for (const [i, { id }] of outputs.entries()) this.#names.set(id, names[i] as string)
  }

  #rule({ op, path }: Node): LoweringRule {
    const rule = Object.hasOwn(this.#rules, op) ? this.#rules[op] : undefined
    if (rule !== undefined) return rule
    throw new RankwiseError('OP_UNSUPPORTED', `the ort backend has no lowering for the operation '${op}'`, {
      where: path || '(model)',
      actual: { op, supported: Object.keys(this.#rules).join(' ') },
    })
  }

  #emit(rule: LoweringRule, node: Node, outputs: readonly Result[]): readonly string[] {
    // Not all of ORT's kernels take tensors without elements; what has none needs no kernel.
    if (outputs.every(({ isUsed, shape }) => !isUsed || sizeOf(shape) === 0)) {
      return outputs.map(({ dtype, shape }) =>
        this.#onnx.constant(hostDType(dtype, node.path), shape, new Uint8Array()),
      )
    }
    const inputs = node.inputs.map((value) => ({ ...value, name: this.#name(value) }))
    return rule({ onnx: this.#onnx, attributes: node.attributes as never, outputs }, ...inputs)
  }

  /** Every output has a name of its own, also when several are the same value. */
  #outputs(values: readonly Value[]): readonly OnnxValueInfo[] {
    const taken = new Set<string>()
    return values.map((value) => {
      const name = this.#name(value)
      const own = taken.has(name) ? this.#onnx.op('Identity', [name]) : name
      taken.add(own)
      return valueInfo(value, own)
    })
  }

  #name({ id }: Value): string {
    const name = this.#names.get(id)
    if (name === undefined) throw new RankwiseError('GRAPH_ORDER', `value ${id} is used before it is computed`)
    return name
  }
}

function valueInfo({ id, name, dtype, shape }: Value, onnxName: string): OnnxValueInfo {
  return { name: onnxName, dtype: hostDType(dtype, name ?? `value ${id}`), shape }
}

/** Ids of the values that the outputs depend on. */
function usedValues({ nodes, outputs }: Segment): ReadonlySet<number> {
  const used = new Set(outputs.map(({ id }) => id))
  for (const node of nodes.toReversed()) {
    if (node.outputs.some(({ id }) => used.has(id))) for (const { id } of node.inputs) used.add(id)
  }
  return used
}

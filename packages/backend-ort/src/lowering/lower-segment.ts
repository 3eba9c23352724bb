import {
  type DType,
  type Node,
  opDefinition,
  RankwiseError,
  type Segment,
  type Shape,
  sizeOf,
  type Value,
} from '@rankwise/core'
import { computeDType, type HostDType, hostDType } from '../host-dtype.ts'
import type { OnnxModel, OnnxValueInfo } from '../onnx/model.ts'
import { type GraphTarget, OnnxBuilder } from '../onnx/onnx-builder.ts'
import { rowsShape, type WeightStorage } from '../weight-storage.ts'
import { attentionRules } from './attention.ts'
import { roundLowered, toBfloat16 } from './bfloat16.ts'
import { elementwiseRules } from './elementwise.ts'
import { linearRules } from './linear.ts'
import { movementRules } from './movement.ts'
import { normRules } from './norm.ts'
import { toFloat32, ValueOperand, WeightOperand } from './operand.ts'
import type { Lowered, LoweringRule, LoweringRules, Operand, Result } from './rule.ts'
import { spatialRules } from './spatial.ts'
import type { Rows } from './tiles.ts'

/** How every operation of `@rankwise/core` but `all_reduce` runs on ORT; that one never reaches a backend. */
export const LOWERING_RULES: LoweringRules = {
  ...elementwiseRules,
  ...linearRules,
  ...movementRules,
  ...normRules,
  ...attentionRules,
  ...spatialRules,
}

/** Rows of one weight of a segment. */
export interface WeightRows extends Rows {
  /** Index of the weight in `segment.parameters`. */
  readonly parameter: number
}

/** How a segment is lowered. */
export interface LoweringOptions {
  /** @default LOWERING_RULES */
  readonly rules?: LoweringRules | undefined
  /** @default the Node.js binding */
  readonly target?: GraphTarget | undefined
}

/** A segment as an ONNX graph. */
export interface LoweredSegment {
  /** Its inputs are the segment's, then the `weightInputs`; its outputs are the segment's, in their order. */
  readonly model: OnnxModel
  readonly weightInputs: readonly WeightRows[]
}

/**
 * Lowers a segment to an ONNX graph.
 *
 * @param storages - of the segment's parameters
 * @throws RankwiseError `OP_UNSUPPORTED` with the module path, `DTYPE_UNSUPPORTED`
 */
export function lowerSegment(
  segment: Segment,
  storages: readonly WeightStorage[],
  options: LoweringOptions = {},
): LoweredSegment {
  return new SegmentLowering(segment, storages, options).run()
}

class SegmentLowering {
  readonly #segment: Segment
  readonly #storages: readonly WeightStorage[]
  readonly #rules: LoweringRules
  readonly #onnx: OnnxBuilder
  /** By the id of the segment's value. */
  readonly #operands = new Map<number, Operand>()
  /** By the name of the input. */
  readonly #weightInputs = new Map<string, WeightRows>()
  readonly #used: ReadonlySet<number>

  constructor(
    segment: Segment,
    storages: readonly WeightStorage[],
    { rules = LOWERING_RULES, target }: LoweringOptions,
  ) {
    this.#onnx = new OnnxBuilder(target)
    this.#segment = segment
    this.#storages = storages
    this.#rules = rules
    this.#used = usedValues(segment)
  }

  run(): LoweredSegment {
    const { inputs, parameters, constants, nodes, outputs, key } = this.#segment
    for (const [i, value] of inputs.entries()) this.#set(value, this.#input(value, `input_${i}`))
    for (const [i, value] of parameters.entries()) this.#operands.set(value.id, this.#weight(i, value))
    for (const value of constants) this.#set(value, this.#constant(value))
    for (const node of nodes) this.#lower(node)
    return { model: this.#onnx.build(key, this.#outputs(outputs)), weightInputs: [...this.#weightInputs.values()] }
  }

  #input(value: Value, name: string): string {
    const input = this.#onnx.input(this.#valueInfo(value, name))
    return value.dtype === 'bfloat16' ? toFloat32(this.#onnx, input, value.dtype) : input
  }

  #weight(parameter: number, value: Value): Operand {
    const { shape, name = `parameter ${parameter}` } = value
    const dtype = computeDType(value.dtype, name)
    if (sizeOf(shape) === 0) return new ValueOperand(this.#onnx, value, this.#empty(dtype, shape, name))
    const storage = this.#storages[parameter] as WeightStorage
    return new WeightOperand(this.#onnx, { dtype, shape }, storage, (rows) => this.#weightInput({ parameter, ...rows }))
  }

  #weightInput(rows: WeightRows): string {
    const { parameter, start, end } = rows
    const name = `parameter_${parameter}[${start}:${end}]`
    if (this.#weightInputs.has(name)) return name
    this.#weightInputs.set(name, rows)
    const { shape } = this.#segment.parameters[parameter] as Value
    const { dtype } = this.#storages[parameter] as WeightStorage
    return this.#onnx.input({
      name,
      dtype: dtype === 'float32' || this.#onnx.target.halfInputs === 'floats' ? dtype : 'uint16',
      shape: rowsShape(shape, end - start),
    })
  }

  #constant({ id, dtype, shape, data }: Value): string {
    if (data === undefined) throw new RankwiseError('CONSTANT_MISSING', `the constant ${id} has no data`)
    const computed = insideDType(hostDType(dtype, `constant ${id}`))
    return this.#onnx.constant(computed, shape, data.cast(computed).data)
  }

  #empty(dtype: DType, shape: Shape, where: string): string {
    return this.#onnx.constant(insideDType(hostDType(dtype, where)), shape, new Uint8Array())
  }

  #lower(node: Node): void {
    const rule = this.#rule(node)
    for (const { dtype } of node.outputs) hostDType(dtype, node.path || '(model)')
    const outputs = node.outputs.map((value) => ({ ...value, isUsed: this.#used.has(value.id) }))
    if (!outputs.some(({ isUsed }) => isUsed)) return
    const lowered = this.#onnx.within(node.path, () => this.#emit(rule, node, outputs))
    for (const [i, value] of node.outputs.entries()) this.#set(value, lowered[i] as Lowered)
  }

  #rule({ op, path }: Node): LoweringRule {
    const rule = Object.hasOwn(this.#rules, op) ? this.#rules[op] : undefined
    if (rule !== undefined) return rule
    throw new RankwiseError('OP_UNSUPPORTED', `the ort backend has no lowering for the operation '${op}'`, {
      where: path || '(model)',
      actual: { op, supported: Object.keys(this.#rules).join(' ') },
    })
  }

  #emit(rule: LoweringRule, node: Node, outputs: readonly Result[]): readonly Lowered[] {
    // Not all of ORT's kernels take tensors without elements; what has none needs no kernel.
    if (outputs.every(({ isUsed, shape }) => !isUsed || sizeOf(shape) === 0)) {
      return outputs.map(({ dtype, shape }) => this.#empty(dtype, shape, node.path))
    }
    const inputs = node.inputs.map((value) => this.#operand(value))
    const results = rule({ onnx: this.#onnx, attributes: node.attributes as never, outputs }, ...inputs)
    if (opDefinition(node.op).movesOnly === true) return results
    return results.map((result, i) => (outputs[i]?.dtype === 'bfloat16' ? roundLowered(this.#onnx, result) : result))
  }

  /**
   * Every output has a name of its own, also when several are the same value, or one is an input: ORT would not write that
   * to memory that it is given for the output.
   */
  #outputs(values: readonly Value[]): readonly OnnxValueInfo[] {
    const taken = new Set(this.#segment.inputs.map((value) => this.#operand(value).name))
    return values.map((value) => {
      const { name } = this.#operand(value)
      if (value.dtype === 'bfloat16') return this.#valueInfo(value, toBfloat16(this.#onnx, name))
      const own = taken.has(name) ? this.#onnx.op('Identity', [name]) : name
      taken.add(own)
      return this.#valueInfo(value, own)
    })
  }

  /** A value as it enters or leaves the graph. */
  #valueInfo({ id, name, dtype, shape }: Value, onnxName: string): OnnxValueInfo {
    const type = hostDType(dtype, name ?? `value ${id}`)
    const isBits = type === 'bfloat16' && this.#onnx.target.halfInputs === 'bits'
    return { name: onnxName, dtype: isBits ? 'uint16' : type, shape }
  }

  #set(value: Value, lowered: Lowered): void {
    this.#operands.set(value.id, new ValueOperand(this.#onnx, value, lowered))
  }

  #operand({ id }: Value): Operand {
    const operand = this.#operands.get(id)
    if (operand === undefined) throw new RankwiseError('GRAPH_ORDER', `value ${id} is used before it is computed`)
    return operand
  }
}

/** The dtype of a value within the graph. */
function insideDType(dtype: HostDType): 'float32' | 'int32' {
  return dtype === 'int32' ? dtype : 'float32'
}

/** Ids of the values that the outputs depend on. */
function usedValues({ nodes, outputs }: Segment): ReadonlySet<number> {
  const used = new Set(outputs.map(({ id }) => id))
  for (const node of nodes.toReversed()) {
    if (node.outputs.some(({ id }) => used.has(id))) for (const { id } of node.inputs) used.add(id)
  }
  return used
}

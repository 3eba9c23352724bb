import type { Shape } from '@rankwise/core'
import type { OnnxAttributes, OnnxDType, OnnxInitializer, OnnxModel, OnnxNode, OnnxValueInfo } from './model.ts'

/** How weights that are stored in 16-bit floats enter a graph: as such, or as uint16 with their bits. */
export type HalfInputs = 'floats' | 'bits'

/** What an engine takes. */
export interface GraphTarget {
  readonly halfInputs: HalfInputs
  /** Whether it has the operator `rankwise.Linear`, which multiplies by weights in bfloat16 as they are. */
  readonly hasLinear: boolean
  /** Most bytes that one cast of a weight gives. @default what stays in the caches of a CPU */
  readonly castBytes?: number
}

const BINDING: GraphTarget = { halfInputs: 'bits', hasLinear: false }

/** Collects the nodes and constants of one ONNX graph; values are known by their names. */
export class OnnxBuilder {
  readonly target: GraphTarget
  readonly #inputs: OnnxValueInfo[] = []
  readonly #initializers = new Map<string, OnnxInitializer>()
  readonly #nodes: OnnxNode[] = []
  readonly #earlyNodes: OnnxNode[] = []
  readonly #values: OnnxValueInfo[] = []
  #path = ''
  #isEarly = false

  /** @param target @default the Node.js binding */
  constructor(target: GraphTarget = BINDING) {
    this.target = target
  }

  /** Emits the nodes of `body` as part of the module at `path`. */
  within<T>(path: string, body: () => T): T {
    this.#path = path
    return body()
  }

  /**
   * Puts the nodes of `body` before all others, because ORT runs a node's operands last one first (it walks back from the
   * results, and from a node first to the operand with the highest number). A cast of a weight that came after the `x` it
   * is multiplied with would run before everything that `x` is computed from, and its float32 would be kept meanwhile:
   * one for every layer of a segment.
   */
  early<T>(body: () => T): T {
    const outer = this.#isEarly
    this.#isEarly = true
    try {
      return body()
    } finally {
      this.#isEarly = outer
    }
  }

  input(info: OnnxValueInfo): string {
    this.#inputs.push(info)
    return info.name
  }

  /**
   * Adds a node with one result and returns the result's name.
   *
   * @param operator - `Concat`, or with its domain `com.microsoft.QuickGelu`
   * @param inputs - an empty name leaves an optional input out
   */
  op(operator: string, inputs: readonly string[], attributes: OnnxAttributes = {}): string {
    return this.ops(operator, inputs, attributes, 1)[0] as string
  }

  /** Adds a node with `count` results and returns their names. */
  ops(operator: string, inputs: readonly string[], attributes: OnnxAttributes, count: number): readonly string[] {
    const dot = operator.lastIndexOf('.')
    const opType = operator.slice(dot + 1)
    const nodes = this.#isEarly ? this.#earlyNodes : this.#nodes
    const name = `${this.#path || '(model)'}/${opType}_${this.#nodes.length + this.#earlyNodes.length}`
    const outputs = Array.from({ length: count }, (_, i) => `${name}:${i}`)
    nodes.push({
      name,
      path: this.#path,
      opType,
      domain: operator.slice(0, Math.max(dot, 0)),
      inputs,
      outputs,
      attributes,
    })
    return outputs
  }

  /** Says what the result of an operator of our own is. */
  declare(info: OnnxValueInfo): string {
    this.#values.push(info)
    return info.name
  }

  /** A constant with these elements; equal ones are stored once. */
  constant(dtype: OnnxDType, shape: Shape, elements: ArrayBufferView): string {
    const bytes = new Uint8Array(elements.buffer, elements.byteOffset, elements.byteLength)
    const key = `${dtype}[${shape.join()}]${Buffer.from(bytes).toString('latin1')}`
    const known = this.#initializers.get(key)
    if (known !== undefined) return known.name
    const name = `constant_${this.#initializers.size}`
    this.#initializers.set(key, { name, dtype, shape, bytes })
    return name
  }

  /** An int64 vector, as the shape-like inputs of operators are. */
  integers(values: readonly number[]): string {
    return this.constant('int64', [values.length], BigInt64Array.from(values, BigInt))
  }

  /** A float32 scalar. */
  scalar(value: number): string {
    return this.constant('float32', [], Float32Array.of(value))
  }

  /** A float32 tensor of one repeated value. ORT folds it, so that the serialised model holds one element. */
  filled(shape: Shape, value: number): string {
    return this.op('Expand', [this.scalar(value), this.integers(shape)])
  }

  reshape(x: string, shape: Shape): string {
    // Without `allowzero` a 0 would mean "as in the input".
    return this.op('Reshape', [x, this.integers(shape)], { allowzero: { i: 1 } })
  }

  build(name: string, outputs: readonly OnnxValueInfo[]): OnnxModel {
    return {
      name,
      inputs: this.#inputs,
      initializers: [...this.#initializers.values()],
      nodes: [...this.#earlyNodes, ...this.#nodes],
      values: this.#values.filter(({ name }) => !outputs.some((output) => output.name === name)),
      outputs,
    }
  }
}

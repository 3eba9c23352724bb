import type { DType } from './dtype.ts'
import type { Shape, Tensor } from './tensor.ts'

/** Dtype and shape of a value that has no data yet. */
export interface TensorType {
  readonly dtype: DType
  readonly shape: Shape
}

/** One value of a graph: an argument, a weight, a constant, or what a node computes. */
export interface Value extends TensorType {
  readonly id: number
  readonly kind: 'input' | 'parameter' | 'constant' | 'result'
  /** Argument name or weight name; results have none. */
  readonly name?: string
  /** Content of a constant. */
  readonly data?: Tensor
}

/** A parameter of an operation that is known while tracing. */
export type Attribute = number | string | boolean | readonly number[]
/** Attributes of an operation by name. */
export type Attributes = Readonly<Record<string, Attribute>>

/** One primitive operation. */
export interface Node<V extends Value = Value> {
  readonly op: string
  readonly inputs: readonly V[]
  readonly attributes: Attributes
  readonly outputs: readonly V[]
  /** Path of the module whose forward emitted it; empty for the model itself. */
  readonly path: string
}

/** What `forward` does at given shapes, in the order it does it. Shapes are those of the whole model. */
export interface Graph {
  readonly name: string
  readonly inputs: readonly Value[]
  readonly parameters: readonly Value[]
  readonly constants: readonly Value[]
  readonly nodes: readonly Node[]
  readonly outputs: Readonly<Record<string, Value>>
}

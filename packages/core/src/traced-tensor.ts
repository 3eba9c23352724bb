import { activeTrace } from './active-trace.ts'
import type { DType } from './dtype.ts'
import type { Attributes, Value } from './graph.ts'
import type { Parameter } from './parameter.ts'
import type { Shape } from './tensor.ts'

/** What an operation takes while a model is traced: a traced value, or a weight. */
export type Operand = TracedTensor | Parameter

/** A tensor that `forward` computes with: it has a dtype and a shape, and operations on it are recorded. */
export class TracedTensor {
  readonly value: Value

  constructor(value: Value) {
    this.value = value
  }

  get dtype(): DType {
    return this.value.dtype
  }

  get shape(): Shape {
    return this.value.shape
  }

  /** Size of a dimension; negative ones count from the end. */
  size(dim: number): number {
    return this.shape[this.#dim(dim)] as number
  }

  /** Sum with another tensor, broadcast as in NumPy, or with a number. */
  add(other: Operand | number): TracedTensor {
    return typeof other === 'number' ? this.#unary('add_scalar', { value: other }) : emitOne('add', [this, other])
  }

  /** Difference, broadcast as in NumPy. */
  sub(other: Operand): TracedTensor {
    return emitOne('sub', [this, other])
  }

  /** Product with another tensor, broadcast as in NumPy, or with a number. */
  mul(other: Operand | number): TracedTensor {
    return typeof other === 'number' ? this.#unary('mul_scalar', { value: other }) : emitOne('mul', [this, other])
  }

  /** Quotient, broadcast as in NumPy. */
  div(other: Operand): TracedTensor {
    return emitOne('div', [this, other])
  }

  /** `x * sigmoid(x)`. */
  silu(): TracedTensor {
    return this.#unary('silu')
  }

  /** Sine, of radians. */
  sin(): TracedTensor {
    return this.#unary('sin')
  }

  /** Cosine, of radians. */
  cos(): TracedTensor {
    return this.#unary('cos')
  }

  /** The same values in another floating-point dtype, rounded to nearest even; itself when it has that dtype. */
  to(dtype: DType): TracedTensor {
    return dtype === this.dtype ? this : this.#unary('cast', { dtype })
  }

  /** The same elements, in row-major order, under another shape. */
  reshape(shape: Shape): TracedTensor {
    return this.#unary('reshape', { shape })
  }

  /** `[.., a * b]` to `[.., a, b]`. */
  unflatten(dim: number, sizes: Shape): TracedTensor {
    const at = this.#dim(dim)
    return this.reshape([...this.shape.slice(0, at), ...sizes, ...this.shape.slice(at + 1)])
  }

  /** Joins the dimensions `start` to `end` (inclusive). */
  flatten(start: number, end: number): TracedTensor {
    const [first, last] = [this.#dim(start), this.#dim(end)]
    const joined = this.shape.slice(first, last + 1).reduce((product, size) => product * size, 1)
    return this.reshape([...this.shape.slice(0, first), joined, ...this.shape.slice(last + 1)])
  }

  /** Inserts a dimension of size 1; negative dims count from the end of the result. */
  unsqueeze(dim: number): TracedTensor {
    const at = dim < 0 ? dim + this.shape.length + 1 : dim
    return this.reshape([...this.shape.slice(0, at), 1, ...this.shape.slice(at)])
  }

  /** Dimension `i` of the result is dimension `permutation[i]`. */
  transpose(permutation: readonly number[]): TracedTensor {
    return this.#unary('transpose', { permutation })
  }

  /** Consecutive pieces of the given sizes along a dimension. */
  split(sizes: readonly number[], dim: number): TracedTensor[] {
    return emit('split', [this], { dim: this.#dim(dim), sizes })
  }

  /** `count` equal pieces. */
  chunk(count: number, dim: number): TracedTensor[] {
    return this.split(new Array(count).fill(this.size(dim) / count), dim)
  }

  /** Elements `start` to `end` (exclusive) along a dimension. */
  slice(dim: number, start: number, end: number = this.size(dim)): TracedTensor {
    const sizes = [start, end - start, this.size(dim) - end]
    const index = start > 0 ? 1 : 0
    return this.split(
      sizes.filter((size, i) => i === 1 || size > 0),
      dim,
    )[index] as TracedTensor
  }

  #dim(dim: number): number {
    return dim < 0 ? dim + this.shape.length : dim
  }

  #unary(op: string, attributes: Attributes = {}): TracedTensor {
    return emitOne(op, [this], attributes)
  }
}

/** Records an operation and returns its results. */
export function emit(op: string, operands: readonly Operand[], attributes: Attributes = {}): TracedTensor[] {
  const inputs = operands.map((operand) => (operand instanceof TracedTensor ? operand.value : operand))
  return activeTrace()
    .emit(op, inputs, attributes)
    .map((value) => new TracedTensor(value))
}

/** Records an operation with one result. */
export function emitOne(op: string, operands: readonly Operand[], attributes: Attributes = {}): TracedTensor {
  return emit(op, operands, attributes)[0] as TracedTensor
}

import type { DType, Shape, TensorData } from '@rankwise/core'
import type { ComputeDType } from './device-dtype.ts'

/** What computes: a GPU or the CPU through TensorFlow's native library, or the CPU through WebAssembly. */
export type EngineName = 'native-gpu' | 'native' | 'wasm'

/** Dtypes of what lies in an engine: float32 to compute with, int32 for ids, bfloat16 for weights. */
export type EngineDType = 'float32' | 'int32' | 'bfloat16'

/** A tensor in an engine. It takes memory there until `free` is called with it, whoever else reads the same elements. */
export interface Ref {
  readonly dtype: EngineDType
  readonly shape: Shape
}

export type BinaryOp = 'add' | 'sub' | 'mul' | 'div' | 'maximum'
export type UnaryOp = 'sigmoid' | 'sin' | 'cos' | 'sqrt' | 'square' | 'exp'
export type ReduceOp = 'mean' | 'sum' | 'max'

/**
 * The kernels that the rules are written in, eager and synchronous. Operands are never changed. Shapes have passed the
 * `infer` rule of an operation of core, and no tensor is without elements.
 */
export abstract class Engine {
  abstract readonly name: EngineName
  /** Threads that one kernel runs on. */
  abstract readonly threads: number
  /** Dtypes that segments may be computed in. */
  abstract readonly dtypes: readonly ComputeDType[]
  /** Tensors that lie in the engine now, those of other users of it included. */
  abstract readonly liveTensors: number
  /** Most bytes that the scores of attention may take at a time. */
  abstract readonly maxScoreBytes: number
  /** Whether it multiplies in bfloat16, and faster than in float32; else bfloat16 weights are cast where they are used. */
  abstract readonly multipliesBfloat16: boolean
  /** Most bytes of a bfloat16 weight that are float32 at a time. */
  abstract readonly maxCastBytes: number
  /** Bytes that weights may take together. */
  abstract readonly maxWeightBytes: number
  /** What the open `tidy` calls have made, the innermost last. */
  readonly #scopes: Set<Ref>[] = []

  /**
   * Frees everything that `body` makes but what it returns.
   *
   * @returns what `body` returns; where that is a tensor that it did not make, another tensor with the same elements
   */
  tidy(body: () => readonly Ref[]): readonly Ref[] {
    const made = new Set<Ref>()
    this.#scopes.push(made)
    try {
      const kept = body().map((ref) => (made.delete(ref) ? ref : this.#shared(ref, made)))
      for (const ref of kept) this.#scopes.at(-2)?.add(ref)
      return kept
    } finally {
      this.#scopes.pop()
      for (const ref of made) this.free(ref)
    }
  }

  #shared(ref: Ref, made: Set<Ref>): Ref {
    const shared = this.reshape(ref, ref.shape)
    made.delete(shared)
    return shared
  }

  /** Every kernel hands its result through here, so that `tidy` knows of it. */
  protected made<R extends Ref>(ref: R): R {
    this.#scopes.at(-1)?.add(ref)
    return ref
  }

  /** How a weight is laid out: stored dimension i is its dimension `order[i]`; `undefined` when it is as it is. */
  abstract weightOrder(shape: Shape): readonly number[] | undefined
  /** The dtype that a weight of a file is kept in, if it is `computed` in that one. */
  abstract weightDType(stored: DType, shape: Shape, computed: ComputeDType): 'float32' | 'bfloat16'

  /** Takes elements over; they must not be written to any more. */
  abstract write(dtype: EngineDType, shape: Shape, data: TensorData): Ref
  /** A copy of the elements. */
  abstract read(ref: Ref): TensorData
  abstract free(ref: Ref): void

  abstract binary(op: BinaryOp, a: Ref, b: Ref): Ref
  abstract unary(op: UnaryOp, x: Ref): Ref
  /** x `[m, n]` to `[m, 1]`. */
  abstract reduce(op: ReduceOp, x: Ref): Ref
  /** x `[m, n]`, along n. */
  abstract softmax(x: Ref): Ref
  abstract cast(x: Ref, dtype: 'float32' | 'bfloat16'): Ref
  /** A float32 tensor rounded to the nearest bfloat16, ties to even, as float32. */
  abstract roundToBfloat16(x: Ref): Ref
  /** a `[n, m, k]`, b `[n, k, p]`, or `[n, p, k]` if `transposeB`. */
  abstract matMul(a: Ref, b: Ref, transposeB: boolean): Ref
  /**
   * Complex products of two tensors whose last dimension is real and imaginary part, with broadcasting of the others.
   * @default the engine has no complex numbers
   */
  multiplyComplex?(x: Ref, y: Ref): Ref
  /** Slices of `x` along dimension `dim`, by int32 ids. */
  abstract gather(x: Ref, ids: Ref, dim: number): Ref
  /** The same elements under another shape; nothing is copied. */
  abstract reshape(x: Ref, shape: Shape): Ref
  abstract transpose(x: Ref, permutation: readonly number[]): Ref
  abstract slice(x: Ref, begin: readonly number[], size: readonly number[]): Ref
  abstract concat(xs: readonly Ref[], dim: number): Ref
  /** Zeros before and after every dimension. */
  abstract pad(x: Ref, paddings: readonly (readonly [before: number, after: number])[]): Ref
  abstract tile(x: Ref, repeats: readonly number[]): Ref
  /** x `[n, h, w, in]`, filter `[kh, kw, in, out]`, without padding. */
  abstract conv2d(x: Ref, filter: Ref, stride: number): Ref

  /** A float32 scalar. */
  scalar(value: number): Ref {
    return this.write('float32', [], Float32Array.of(value))
  }
}

import { type DeviceTensor, RankwiseError, type Shape, Tensor, type TensorData } from '@rankwise/core'
import type { ValueDType } from './device-dtype.ts'
import type { Engine, Ref } from './engine.ts'

/** How a weight lies in the engine: stored dimension i is dimension `order[i]` of the weight. */
export interface StoredWeight {
  readonly ref: Ref
  readonly order: readonly number[]
}

interface Content {
  readonly engine: Engine
  readonly ref: Ref
  /** Of the tensor; the elements of bfloat16 may be float32 that are rounded to it. */
  readonly dtype: ValueDType
  /** Of the tensor; its elements may be stored in another order of dimensions. */
  readonly shape: Shape
  /** @default as they are */
  readonly order?: readonly number[] | undefined
}

/** A tensor in the engine: an activation, or a weight in the order that its kernel takes. */
export class TfjsTensor implements DeviceTensor {
  readonly dtype: ValueDType
  readonly shape: Shape
  /** `float32`, or of a weight that is stored in another order `float32 [1,0]`. */
  readonly storage: string
  /** Bytes that it takes in the engine. */
  readonly byteLength: number
  readonly #engine: Engine
  readonly #order: readonly number[] | undefined
  readonly #onDispose: ((tensor: TfjsTensor) => void) | undefined
  #ref: Ref | undefined
  #readers = 0
  #isDisposed = false

  constructor({ engine, ref, dtype, shape, order }: Content, onDispose?: (tensor: TfjsTensor) => void) {
    this.dtype = dtype
    this.shape = shape
    this.storage = order === undefined ? ref.dtype : `${ref.dtype} [${order.join()}]`
    this.byteLength = shape.reduce((size, dim) => size * dim, ref.dtype === 'bfloat16' ? 2 : 4)
    this.#engine = engine
    this.#ref = ref
    this.#order = order
    this.#onDispose = onDispose
  }

  /** The tensor of this engine behind `tensor`. @throws RankwiseError `TENSOR_FOREIGN` */
  static from(tensor: DeviceTensor, engine: Engine): TfjsTensor {
    if (tensor instanceof TfjsTensor && tensor.#engine === engine) return tensor
    throw new RankwiseError('TENSOR_FOREIGN', 'the tensor belongs to another backend', {
      rule: 'a backend computes with tensors that it made',
    })
  }

  /** As it is stored. @throws RankwiseError `TENSOR_DISPOSED` */
  get stored(): StoredWeight {
    return { ref: this.#alive(), order: this.#order ?? this.shape.map((_, dim) => dim) }
  }

  /** A copy of its elements on the host, in the order of its shape. @throws RankwiseError `TENSOR_DISPOSED` */
  download(): Tensor {
    const ref = this.#alive()
    const data = this.#order === undefined ? this.#engine.read(ref) : this.#readInOrder(ref, this.#order)
    return new Tensor(ref.dtype, this.shape, data as never).cast(this.dtype)
  }

  /** @throws RankwiseError `TENSOR_DISPOSED` */
  requireAlive(): void {
    this.#alive()
  }

  /** Keeps its memory until `release`, also when it is disposed before. @throws RankwiseError `TENSOR_DISPOSED` */
  retain(): void {
    this.#alive()
    this.#readers++
  }

  release(): void {
    this.#readers--
    this.#freeUnread()
  }

  dispose(): void {
    if (this.#isDisposed) return
    this.#isDisposed = true
    this.#onDispose?.(this)
    this.#freeUnread()
  }

  #freeUnread(): void {
    if (!this.#isDisposed || this.#readers > 0 || this.#ref === undefined) return
    this.#engine.free(this.#ref)
    this.#ref = undefined
  }

  #readInOrder(ref: Ref, order: readonly number[]): TensorData {
    const [moved] = this.#engine.tidy(() => [this.#engine.transpose(ref, inverse(order))])
    try {
      return this.#engine.read(moved as Ref)
    } finally {
      this.#engine.free(moved as Ref)
    }
  }

  #alive(): Ref {
    if (!this.#isDisposed && this.#ref !== undefined) return this.#ref
    throw new RankwiseError('TENSOR_DISPOSED', 'the tensor was disposed', {
      actual: { dtype: this.dtype, shape: this.shape },
    })
  }
}

/** The permutation that undoes another. */
export function inverse(order: readonly number[]): readonly number[] {
  return order.map((_, dim) => order.indexOf(dim))
}

import { type DType, type DTypeArrays, type Shape, Tensor } from '@rankwise/core'

/**
 * A tensor in memory that all ranks of a group share: it is reduced where it is, without being copied. `dispose`, or
 * `using`, gives the memory back; the group does so too when it is destroyed. After that the tensor, and every view of its
 * data, holds private zeros, and the group refuses it with `TENSOR_DISPOSED`. In a group that exchanges over TCP the
 * memory is private from the start; it is freed when no view of it is left.
 */
export class SharedTensor<D extends DType = DType> extends Tensor<D> implements Disposable {
  readonly #release: () => void

  constructor(dtype: D, shape: Shape, data: DTypeArrays[D], release: () => void) {
    super(dtype, shape, data)
    this.#release = release
  }

  /** Gives the memory back once the operations that were called before have completed; idempotent. */
  dispose(): void {
    this.#release()
  }

  /** `dispose`, for `using`. */
  [Symbol.dispose](): void {
    this.dispose()
  }
}

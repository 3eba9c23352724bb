import { type DeviceTensor, RankwiseError, type Shape, type Tensor } from '@rankwise/core'
import { type HostDType, hostDType } from './host-dtype.ts'

/** A tensor of the ort backend. It lies in host memory, and ORT reads it where it is. */
export class HostTensor implements DeviceTensor {
  readonly dtype: HostDType
  readonly shape: Shape
  #tensor: Tensor | undefined
  /** Where the memory goes when it is not needed any more; undefined where somebody else may have it. */
  #recycle: ((tensor: Tensor) => void) | undefined
  /** What is to be recycled once nothing reads it. */
  #disposed: Tensor | undefined
  #readers = 0

  /**
   * @param recycle - gets the tensor after it was disposed, unless it was given away. @default the garbage collector
   * @throws RankwiseError `DTYPE_UNSUPPORTED`
   */
  constructor(tensor: Tensor, recycle?: (tensor: Tensor) => void) {
    this.dtype = hostDType(tensor.dtype, 'tensor')
    this.shape = tensor.shape
    this.#tensor = tensor
    this.#recycle = recycle
  }

  /** The tensor of this backend behind `tensor`. @throws RankwiseError `TENSOR_FOREIGN` */
  static from(tensor: DeviceTensor): HostTensor {
    if (tensor instanceof HostTensor) return tensor
    throw new RankwiseError('TENSOR_FOREIGN', 'the tensor belongs to another backend', {
      rule: 'a backend computes with tensors that it made',
    })
  }

  /** The memory, to be used only until it is disposed. @throws RankwiseError `TENSOR_DISPOSED` */
  get tensor(): Tensor {
    if (this.#tensor === undefined) {
      throw new RankwiseError('TENSOR_DISPOSED', 'the tensor was disposed', {
        actual: { dtype: this.dtype, shape: this.shape },
      })
    }
    return this.#tensor
  }

  /** The memory, which is the caller's as well from now on. @throws RankwiseError `TENSOR_DISPOSED` */
  give(): Tensor {
    const { tensor } = this
    this.#recycle = undefined
    return tensor
  }

  /** Keeps the memory as it is until `release`, also when the tensor is disposed before. */
  retain(): void {
    this.#readers++
  }

  release(): void {
    this.#readers--
    this.#free()
  }

  dispose(): void {
    if (this.#tensor === undefined) return
    this.#disposed = this.#tensor
    this.#tensor = undefined
    this.#free()
  }

  #free(): void {
    if (this.#disposed === undefined || this.#readers > 0) return
    this.#recycle?.(this.#disposed)
    this.#disposed = undefined
  }
}

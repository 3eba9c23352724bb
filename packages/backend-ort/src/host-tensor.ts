import { type DeviceTensor, RankwiseError, type Shape, type Tensor } from '@rankwise/core'
import { HeldMemory } from './held-memory.ts'
import { type HostDType, hostDType } from './host-dtype.ts'

/** A tensor of the ort backend. It lies in host memory, and ORT reads it where it is. */
export class HostTensor implements DeviceTensor {
  readonly dtype: HostDType
  readonly shape: Shape
  readonly #held: HeldMemory<Tensor>
  /** Where the memory goes when it is not needed any more; undefined where somebody else may have it. */
  #recycle: ((tensor: Tensor) => void) | undefined

  /**
   * @param recycle - gets the tensor after it was disposed, unless it was given away. @default the garbage collector
   * @throws RankwiseError `DTYPE_UNSUPPORTED`
   */
  constructor(tensor: Tensor, recycle?: (tensor: Tensor) => void) {
    this.dtype = hostDType(tensor.dtype, 'tensor')
    this.shape = tensor.shape
    this.#recycle = recycle
    this.#held = new HeldMemory(tensor, (unread) => this.#recycle?.(unread))
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
    const { memory } = this.#held
    if (memory !== undefined) return memory
    throw new RankwiseError('TENSOR_DISPOSED', 'the tensor was disposed', {
      actual: { dtype: this.dtype, shape: this.shape },
    })
  }

  /** The memory, which is the caller's as well from now on. @throws RankwiseError `TENSOR_DISPOSED` */
  give(): Tensor {
    const { tensor } = this
    this.#recycle = undefined
    return tensor
  }

  /** Keeps the memory as it is until `release`, also when the tensor is disposed before. */
  retain(): void {
    this.#held.retain()
  }

  release(): void {
    this.#held.release()
  }

  dispose(): void {
    this.#held.dispose()
  }
}

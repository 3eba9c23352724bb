import { type DeviceTensor, RankwiseError, type Shape, type Tensor } from '@rankwise/core'
import { type HostDType, hostDType } from './host-dtype.ts'

/** A tensor of the ort backend. It lies in host memory, and ORT reads it where it is. */
export class HostTensor implements DeviceTensor {
  readonly dtype: HostDType
  readonly shape: Shape
  #tensor: Tensor | undefined

  /** @throws RankwiseError `DTYPE_UNSUPPORTED` */
  constructor(tensor: Tensor) {
    this.dtype = hostDType(tensor.dtype, 'tensor')
    this.shape = tensor.shape
    // The Node binding of ORT takes no shared memory.
    this.#tensor = tensor.data.buffer instanceof SharedArrayBuffer ? tensor.clone() : tensor
  }

  /** The tensor of this backend behind `tensor`. @throws RankwiseError `TENSOR_FOREIGN` */
  static from(tensor: DeviceTensor): HostTensor {
    if (tensor instanceof HostTensor) return tensor
    throw new RankwiseError('TENSOR_FOREIGN', 'the tensor belongs to another backend', {
      rule: 'a backend computes with tensors that it made',
    })
  }

  /** @throws RankwiseError `TENSOR_DISPOSED` */
  get tensor(): Tensor {
    if (this.#tensor === undefined) {
      throw new RankwiseError('TENSOR_DISPOSED', 'the tensor was disposed', {
        actual: { dtype: this.dtype, shape: this.shape },
      })
    }
    return this.#tensor
  }

  dispose(): void {
    this.#tensor = undefined
  }
}

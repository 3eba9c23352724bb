import { type DeviceTensor, itemSize, RankwiseError, type Shape, sizeOf, type Tensor } from '@rankwise/core'
import type { ReadableValue, ReadableWeight } from '../executable.ts'
import { HeldMemory } from '../held-memory.ts'
import { isWeightDType, rowsShape, type WeightStorage, wholeStorage } from '../weight-storage.ts'
import type { GpuBuffer, GpuDType, GpuMemory } from './gpu-memory.ts'

/** How a tensor leaves the GPU again. */
export interface GpuTensorOptions {
  /** Gets the memory after the tensor was disposed and nothing reads it any more. */
  readonly free: (buffer: GpuBuffer) => void
  readonly onDispose?: (tensor: GpuTensor) => void
}

/** The smallest and the largest of some ids. */
export interface IdRange {
  readonly least: number
  readonly most: number
}

/** A value or a weight in memory of the GPU, in one piece. */
export class GpuTensor implements ReadableValue<GpuBuffer>, ReadableWeight<GpuBuffer> {
  readonly dtype: GpuDType
  readonly shape: Shape
  readonly byteLength: number
  readonly isMapped = false
  /** Of ids that came from the host. */
  readonly ids: IdRange | undefined
  readonly #held: HeldMemory<GpuBuffer>
  readonly #onDispose: GpuTensorOptions['onDispose']
  #ready: Promise<void> | undefined

  constructor(buffer: GpuBuffer, { free, onDispose }: GpuTensorOptions, ids?: IdRange) {
    this.dtype = buffer.dtype
    this.shape = buffer.shape
    this.byteLength = sizeOf(buffer.shape) * itemSize(buffer.dtype)
    this.ids = ids
    this.#held = new HeldMemory(buffer, free)
    this.#onDispose = onDispose
  }

  /** Begins to copy a host tensor, which nobody writes to any more. @throws RankwiseError `ORT_CUDA_MEMORY`, `BACKEND_DISPOSED` */
  static upload(tensor: Tensor<GpuDType>, memory: GpuMemory, options: GpuTensorOptions): GpuTensor {
    const buffer = memory.allocate(tensor.dtype, tensor.shape)
    const uploaded = new GpuTensor(buffer, options, idsOf(tensor))
    uploaded.#write(memory.write(buffer, tensor))
    return uploaded
  }

  /** The tensor of this backend behind `tensor`. @throws RankwiseError `TENSOR_FOREIGN` */
  static from(tensor: DeviceTensor): GpuTensor {
    if (tensor instanceof GpuTensor) return tensor
    throw new RankwiseError('TENSOR_FOREIGN', 'the tensor belongs to another backend', {
      rule: 'a backend computes with tensors that it made',
    })
  }

  /** As {@link from}; undefined when it holds no weight. @throws RankwiseError `TENSOR_FOREIGN`, `TENSOR_DISPOSED` */
  static weight(tensor: DeviceTensor): GpuTensor | undefined {
    const weight = GpuTensor.from(tensor)
    return isWeightDType(weight.tensor.dtype) ? weight : undefined
  }

  /** The memory, to be used only until it is disposed. @throws RankwiseError `TENSOR_DISPOSED` */
  get tensor(): GpuBuffer {
    const { memory } = this.#held
    if (memory !== undefined) return memory
    throw new RankwiseError('TENSOR_DISPOSED', 'the tensor was disposed', {
      actual: { dtype: this.dtype, shape: this.shape },
    })
  }

  /** Rejects if the content did not come to the GPU; undefined once it is there. */
  get ready(): Promise<void> | undefined {
    return this.#ready
  }

  get layout(): WeightStorage {
    const { dtype } = this
    if (isWeightDType(dtype)) return wholeStorage(dtype, this.shape)
    throw new RankwiseError('ARGUMENT_MISMATCH', 'the tensor is no weight', { actual: { dtype } })
  }

  /** How a graph reads it as a weight. */
  get storage(): string {
    return this.dtype
  }

  rows(start: number, end: number): GpuBuffer {
    const { dtype, shape, dataPtr } = this.tensor
    const rowBytes = sizeOf(shape.slice(1)) * itemSize(dtype)
    return { dtype, shape: rowsShape(shape, end - start), dataPtr: dataPtr + BigInt(start * rowBytes) }
  }

  /** Keeps the memory as it is until `release`, also when the tensor is disposed before. */
  retain(): void {
    this.#held.retain()
  }

  release(): void {
    this.#held.release()
  }

  dispose(): void {
    if (this.#held.dispose()) this.#onDispose?.(this)
  }

  #write(writing: Promise<void>): void {
    this.retain()
    this.#ready = writing
    writing.then(
      () => {
        this.#ready = undefined
        this.release()
      },
      // Whoever uses the tensor learns of it.
      () => this.release(),
    )
  }
}

function idsOf({ dtype, data }: Tensor): IdRange | undefined {
  if (dtype !== 'int32') return undefined
  const ids = data as Int32Array
  return ids.reduce(({ least, most }, id) => ({ least: Math.min(least, id), most: Math.max(most, id) }), {
    least: Number.POSITIVE_INFINITY,
    most: Number.NEGATIVE_INFINITY,
  })
}

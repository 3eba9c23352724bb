import { type DeviceBuffer, itemSize, RankwiseError, type Shape, sizeOf, Tensor, type TensorData } from '@rankwise/core'
import type { Addon, NativeEngine } from '../engine/addon.ts'
import type { ValueMemory } from '../engine/capi-session.ts'
import { messageOf } from '../engine/session-error.ts'
import type { HostDType } from '../host-dtype.ts'
import type { OnnxValueInfo } from '../onnx/model.ts'
import type { WeightDType } from '../weight-storage.ts'

/** Dtypes of tensors on the GPU. */
export type GpuDType = HostDType | WeightDType

/** A buffer of this backend. */
export interface GpuBuffer extends DeviceBuffer {
  readonly dtype: GpuDType
}

/**
 * Memory of the GPU. What results and inputs of earlier steps had is used again: `cudaMalloc` and `cudaFree` wait for what
 * the GPU is doing.
 */
export class GpuMemory implements ValueMemory<GpuBuffer> {
  readonly #addon: Addon
  readonly #native: NativeEngine
  /** Addresses by their bytes. */
  readonly #free = new Map<number, bigint[]>()
  readonly #copies = new Set<Promise<void>>()
  #isDisposed = false

  constructor(addon: Addon, native: NativeEngine) {
    this.#addon = addon
    this.#native = native
  }

  take({ dtype, shape }: OnnxValueInfo): GpuBuffer {
    return this.allocate(dtype === 'int32' || dtype === 'bfloat16' ? dtype : 'float32', shape)
  }

  /** Memory with any content. @throws RankwiseError `ORT_CUDA_MEMORY`, `BACKEND_DISPOSED` */
  allocate(dtype: GpuDType, shape: Shape): GpuBuffer {
    this.#requireAlive()
    const bytes = bytesOf(dtype, shape)
    return { dtype, shape, dataPtr: this.#free.get(bytes)?.pop() ?? this.#allocate(bytes) }
  }

  give({ dtype, shape, dataPtr }: GpuBuffer): void {
    // The engine has freed everything.
    if (this.#isDisposed) return
    const bytes = bytesOf(dtype, shape)
    const free = this.#free.get(bytes)
    if (free === undefined) this.#free.set(bytes, [dataPtr])
    else free.push(dataPtr)
  }

  /** Frees memory that nothing of its size will be needed for again. */
  release({ dataPtr }: GpuBuffer): void {
    if (!this.#isDisposed) this.#freeAddress(dataPtr)
  }

  data({ dataPtr }: GpuBuffer): bigint {
    return dataPtr
  }

  /** Copies to the GPU, before everything that the engine is given later. @throws RankwiseError `ORT_CUDA_COPY` */
  write({ dataPtr }: GpuBuffer, { data }: Tensor): Promise<void> {
    return this.#copy(data, () => this.#addon.cudaWrite(this.#native, dataPtr, data))
  }

  /** Copies from the GPU, after everything that the engine was given before. @throws RankwiseError `ORT_CUDA_COPY`, `BACKEND_DISPOSED` */
  async read({ dtype, shape, dataPtr }: GpuBuffer): Promise<Tensor> {
    this.#requireAlive()
    const tensor = Tensor.zeros(dtype, shape)
    await this.#copy(tensor.data, () => this.#addon.cudaRead(this.#native, dataPtr, tensor.data))
    return tensor
  }

  clear(): void {
    for (const addresses of this.#free.values()) {
      for (const address of addresses) this.#freeAddress(address)
    }
    this.#free.clear()
  }

  /** Waits for copies; what is still allocated is freed when the engine is closed. */
  async dispose(): Promise<void> {
    while (this.#copies.size > 0) await Promise.allSettled(this.#copies)
    if (!this.#isDisposed) this.clear()
    this.#isDisposed = true
  }

  #allocate(bytes: number): bigint {
    try {
      return this.#addon.cudaAllocate(this.#native, bytes)
    } catch {
      // What is kept to be used again may be what is missing.
      this.clear()
    }
    try {
      return this.#addon.cudaAllocate(this.#native, bytes)
    } catch (cause) {
      throw new RankwiseError('ORT_CUDA_MEMORY', `memory of the GPU cannot be allocated: ${messageOf(cause)}`, {
        actual: { bytes },
        remedy: 'split the model over more GPUs, or end what else takes memory of this one (`nvidia-smi`)',
        cause,
      })
    }
  }

  /** After some errors of a GPU every call fails with them; whoever computes learns of it. */
  #freeAddress(address: bigint): void {
    try {
      this.#addon.cudaFree(this.#native, address)
    } catch (error) {
      if (!messageOf(error).startsWith('cuda')) throw error
    }
  }

  async #copy(data: TensorData, start: () => Promise<void>): Promise<void> {
    if (data.length === 0) return
    const copy = start()
    this.#copies.add(copy)
    try {
      await copy
    } catch (cause) {
      throw new RankwiseError('ORT_CUDA_COPY', `a tensor cannot be copied to or from the GPU: ${messageOf(cause)}`, {
        actual: { bytes: data.byteLength },
        cause,
      })
    } finally {
      this.#copies.delete(copy)
    }
  }

  #requireAlive(): void {
    if (this.#isDisposed) throw new RankwiseError('BACKEND_DISPOSED', 'the backend ort was disposed')
  }
}

/** ONNX Runtime asks for an address also where there are no elements. */
function bytesOf(dtype: GpuDType, shape: Shape): number {
  return Math.max(1, sizeOf(shape) * itemSize(dtype))
}

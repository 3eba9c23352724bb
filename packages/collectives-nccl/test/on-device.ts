import { itemSize, sizeOf } from '@rankwise/core'
import { CudaRuntime } from '../src/cuda-runtime.ts'
import type { DeviceBuffer } from '../src/index.ts'
import type { TensorBytes } from './ranks.ts'

/** Buffers on the device, filled and read through pinned memory, as a backend would. */
export class OnDevice {
  readonly #cuda: CudaRuntime
  readonly #stream: bigint
  readonly #free: (() => void)[] = []

  private constructor(cuda: CudaRuntime, device: number) {
    this.#cuda = cuda
    cuda.setDevice(device)
    this.#stream = cuda.createStream()
    this.#free.push(() => cuda.destroyStream(this.#stream))
  }

  static async open(device = 0): Promise<OnDevice> {
    return new OnDevice(await CudaRuntime.load({}), device)
  }

  put({ dtype, shape, bytes }: TensorBytes): DeviceBuffer {
    const buffer = this.#allocate(dtype, shape)
    if (bytes.length === 0) return buffer
    const pinned = this.#pinned(bytes.length)
    pinned.bytes.set(bytes)
    this.#cuda.copyToDevice(buffer.dataPtr, pinned.address, bytes.length, this.#stream)
    this.#wait()
    return buffer
  }

  /** Room for a result with `factor` times the rows. */
  like({ dtype, shape: [rows = 0, ...rest] }: DeviceBuffer, factor: number): DeviceBuffer {
    return this.#allocate(dtype, [rows * factor, ...rest])
  }

  get({ dataPtr, dtype, shape }: DeviceBuffer): Uint8Array {
    const length = sizeOf(shape) * itemSize(dtype)
    if (length === 0) return new Uint8Array(0)
    const pinned = this.#pinned(length)
    this.#cuda.copyToHost(pinned.address, dataPtr, length, this.#stream)
    this.#wait()
    return pinned.bytes.slice()
  }

  /** Frees everything; nothing works any more after it. */
  free(): void {
    for (const free of this.#free.splice(0).reverse()) free()
  }

  #allocate(dtype: DeviceBuffer['dtype'], shape: DeviceBuffer['shape']): DeviceBuffer {
    const dataPtr = this.#cuda.allocate(Math.max(1, sizeOf(shape) * itemSize(dtype)))
    this.#free.push(() => this.#cuda.free(dataPtr))
    return { dataPtr, dtype, shape }
  }

  #pinned(length: number) {
    const pinned = this.#cuda.allocatePinned(length)
    this.#free.push(() => this.#cuda.freePinned(pinned))
    return pinned
  }

  #wait(): void {
    const event = this.#cuda.createEvent()
    this.#cuda.recordEvent(event, this.#stream)
    while (!this.#cuda.hasHappened(event)) {
      // a copy takes milliseconds
    }
    this.#cuda.destroyEvent(event)
  }
}

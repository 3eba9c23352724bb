import {
  type Backend,
  type Capabilities,
  type DeviceMemory,
  type DeviceTensor,
  type Executable,
  type LoadShardOptions,
  type MemoryReport,
  RankwiseError,
  type Segment,
  type ShardSource,
  type Tensor,
} from '@rankwise/core'
import type { ComputeDevice, LoadedWeight } from './device.ts'
import type { EngineName } from './engine/engine.ts'
import type { EngineSelection } from './engine/engine-selection.ts'
import type { OrtExecutable } from './executable.ts'
import { computeDType } from './host-dtype.ts'

/** Runs segments on ONNX Runtime's CPU or CUDA provider, in float32 or bfloat16. Made by {@link ort}. */
export class OrtBackend implements Backend {
  /** `ort-capi` or `ort-binding` on the CPU, `ort-cuda` on a GPU. */
  readonly name: string
  readonly supports: Capabilities = { dtypes: ['float32', 'bfloat16'] }
  /** Threads that one operation runs on. */
  readonly threads: number
  /** What calls ONNX Runtime, and why not something else. */
  readonly selection: EngineSelection
  /**
   * The memory of a value on the CPU, to be read and written to until it is disposed; throws `TENSOR_DISPOSED`,
   * `TENSOR_FOREIGN`.
   */
  readonly borrow?: (tensor: DeviceTensor) => Tensor
  /** Where values are on a GPU. */
  readonly deviceMemory?: DeviceMemory
  readonly #device: ComputeDevice
  readonly #weights = new Set<LoadedWeight>()
  readonly #executables = new Set<OrtExecutable>()
  readonly #compiling = new Set<Promise<Executable>>()
  #disposing: Promise<void> | undefined
  #isDisposed = false

  constructor(device: ComputeDevice, selection: EngineSelection) {
    this.name = `ort-${device.deviceMemory === undefined ? device.engine.name : 'cuda'}`
    this.threads = device.engine.threads
    this.selection = selection
    this.#device = device
    if (device.borrow !== undefined) this.borrow = device.borrow.bind(device)
    if (device.deviceMemory !== undefined) this.deviceMemory = device.deviceMemory
  }

  /** What calls ONNX Runtime. */
  get engine(): EngineName {
    return this.#device.engine.name
  }

  /**
   * Maps or reads a rank's slice, and on a GPU copies it there. For float32 it keeps the dtype of its file; for bfloat16 it
   * is rounded to that.
   *
   * @throws RankwiseError `DTYPE_UNSUPPORTED` unless `dtype` is float32 or bfloat16, `BACKEND_MAPPING` when weights must be mapped,
   *   `ORT_CUDA_MEMORY`, `ORT_CUDA_COPY`, `BACKEND_DISPOSED`, `ABORTED`, and those of the source
   */
  async loadShard(source: ShardSource, { dtype, signal }: LoadShardOptions): Promise<DeviceTensor> {
    this.#requireAlive()
    const options = { dtype: computeDType(dtype, source.name), signal }
    const weight = await this.#device.load(source, options, (freed) => this.#weights.delete(freed))
    this.#weights.add(weight)
    if (this.#isDisposed) weight.dispose()
    this.#requireAlive()
    return weight
  }

  /**
   * Lowers a segment to an ONNX graph and has ORT optimise it. Nothing is cached here: equal segments are compiled anew.
   *
   * @param parameters - weights of the first run; those of later runs are stored alike. @default whole, in the dtype that they are computed in
   * @throws RankwiseError `OP_UNSUPPORTED`, `DTYPE_UNSUPPORTED`, `ARGUMENT_MISMATCH` when the weights are not those of the
   *   segment, `TENSOR_FOREIGN`, `ORT_COMPILE`, `BACKEND_DISPOSED`
   */
  async compile(segment: Segment, parameters?: readonly DeviceTensor[]): Promise<Executable> {
    this.#requireAlive()
    const compiling = this.#compile(segment, parameters)
    this.#compiling.add(compiling)
    try {
      return await compiling
    } finally {
      this.#compiling.delete(compiling)
    }
  }

  /**
   * Shares the memory of `tensor`, or copies it to the GPU.
   *
   * @throws RankwiseError `DTYPE_UNSUPPORTED`, `BACKEND_DISPOSED`, `ORT_CUDA_MEMORY`
   */
  upload(tensor: Tensor): DeviceTensor {
    this.#requireAlive()
    return this.#device.upload(tensor)
  }

  /**
   * The tensor itself; of a weight that is mapped, or on a GPU, a copy. Weights are in the dtype they are kept in.
   *
   * @throws RankwiseError `TENSOR_DISPOSED`, `TENSOR_FOREIGN`; on a GPU also `ORT_CUDA_COPY`, `BACKEND_DISPOSED`
   */
  async download(tensor: DeviceTensor): Promise<Tensor> {
    return this.#device.download(tensor)
  }

  /** Weights that are loaded and sessions that are open now. */
  memory(): MemoryReport {
    const bytesOf = (isMapped: boolean) =>
      [...this.#weights].reduce((sum, weight) => (weight.isMapped === isMapped ? sum + weight.byteLength : sum), 0)
    return { weightBytes: bytesOf(false), mappedBytes: bytesOf(true), executables: this.#executables.size }
  }

  /** Frees weights and executables; idempotent. Runs that are under way are waited for. */
  async dispose(): Promise<void> {
    this.#isDisposed = true
    this.#disposing ??= this.#free()
    await this.#disposing
  }

  /** `dispose`, for `await using`. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.dispose()
  }

  async #compile(segment: Segment, parameters: readonly DeviceTensor[] | undefined): Promise<Executable> {
    const executable = await this.#device.compile(segment, parameters, (disposed) => this.#executables.delete(disposed))
    if (this.#isDisposed) await executable.dispose()
    this.#requireAlive()
    this.#executables.add(executable)
    return executable
  }

  async #free(): Promise<void> {
    for (const weight of this.#weights) weight.dispose()
    await Promise.allSettled(this.#compiling)
    await Promise.all([...this.#executables].map((executable) => executable.dispose()))
    await this.#device.dispose()
  }

  #requireAlive(): void {
    if (this.#isDisposed) throw new RankwiseError('BACKEND_DISPOSED', 'the backend ort was disposed')
  }
}

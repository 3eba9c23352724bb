import {
  type Backend,
  type Capabilities,
  type DeviceTensor,
  type Executable,
  type LoadShardOptions,
  type MemoryReport,
  RankwiseError,
  type Segment,
  type ShardSource,
  type Tensor,
} from '@rankwise/core'
import { OrtExecutable } from './executable.ts'
import { HostTensor } from './host-tensor.ts'
import type { SessionOptions } from './session.ts'

/** Runs segments on ONNX Runtime's CPU provider, in float32. Made by {@link ort}. */
export class OrtBackend implements Backend {
  readonly name = 'ort'
  readonly supports: Capabilities = { dtypes: ['float32'] }
  /** Threads that one operation runs on. */
  readonly threads: number
  readonly #weights = new Set<HostTensor>()
  readonly #executables = new Set<OrtExecutable>()
  #isDisposed = false

  constructor({ threads }: SessionOptions) {
    this.threads = threads
  }

  /**
   * Reads a rank's slice and casts it to float32.
   *
   * @throws RankwiseError `DTYPE_UNSUPPORTED` unless `dtype` is float32, `BACKEND_DISPOSED`, `ABORTED`, and those of the
   * source
   */
  async loadShard(source: ShardSource, { dtype, signal }: LoadShardOptions): Promise<DeviceTensor> {
    this.#requireAlive()
    if (!this.supports.dtypes.includes(dtype)) {
      throw new RankwiseError('DTYPE_UNSUPPORTED', `the backend ort does not compute in ${dtype}`, {
        where: source.name,
        actual: { dtype, supported: this.supports.dtypes },
        rule: 'dtype is one that the backend computes in; weights stored in another are cast after slicing',
      })
    }
    const tensor = (await source.read({ signal })).cast(dtype)
    this.#requireAlive()
    const weight = new HostTensor(tensor, (freed) => this.#weights.delete(freed))
    this.#weights.add(weight)
    return weight
  }

  /**
   * Lowers a segment to an ONNX graph and has ORT optimise it. Nothing is cached here: equal segments are compiled anew.
   *
   * @throws RankwiseError `OP_UNSUPPORTED`, `DTYPE_UNSUPPORTED`, `ORT_COMPILE`, `BACKEND_DISPOSED`
   */
  async compile(segment: Segment): Promise<Executable> {
    this.#requireAlive()
    const executable = await OrtExecutable.compile(segment, {
      threads: this.threads,
      onDispose: (disposed) => this.#executables.delete(disposed),
    })
    if (this.#isDisposed) await executable.dispose()
    this.#requireAlive()
    this.#executables.add(executable)
    return executable
  }

  /** Shares the memory of `tensor`. @throws RankwiseError `DTYPE_UNSUPPORTED`, `BACKEND_DISPOSED` */
  upload(tensor: Tensor): DeviceTensor {
    this.#requireAlive()
    return new HostTensor(tensor)
  }

  /** The tensor itself, not a copy. @throws RankwiseError `TENSOR_DISPOSED`, `TENSOR_FOREIGN` */
  async download(tensor: DeviceTensor): Promise<Tensor> {
    return HostTensor.from(tensor).tensor
  }

  /** Weights that are loaded and sessions that are open now. */
  memory(): MemoryReport {
    const weightBytes = [...this.#weights].reduce((sum, { tensor }) => sum + tensor.byteLength, 0)
    return { weightBytes, mappedBytes: 0, executables: this.#executables.size }
  }

  /** Frees weights and executables; idempotent. Runs that are under way are waited for. */
  async dispose(): Promise<void> {
    this.#isDisposed = true
    for (const weight of this.#weights) weight.dispose()
    await Promise.all([...this.#executables].map((executable) => executable.dispose()))
  }

  /** `dispose`, for `await using`. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.dispose()
  }

  #requireAlive(): void {
    if (this.#isDisposed) throw new RankwiseError('BACKEND_DISPOSED', 'the backend ort was disposed')
  }
}

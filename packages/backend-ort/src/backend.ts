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
import { computeDType } from './host-dtype.ts'
import { HostTensor } from './host-tensor.ts'
import type { SessionOptions } from './session.ts'
import type { WeightLoader } from './weight-loader.ts'
import { WeightTensor } from './weight-tensor.ts'

/** Runs segments on ONNX Runtime's CPU provider, in float32 or bfloat16. Made by {@link ort}. */
export class OrtBackend implements Backend {
  readonly name = 'ort'
  readonly supports: Capabilities = { dtypes: ['float32', 'bfloat16'] }
  /** Threads that one operation runs on. */
  readonly threads: number
  readonly #loader: WeightLoader
  readonly #weights = new Set<WeightTensor>()
  readonly #executables = new Set<OrtExecutable>()
  #isDisposed = false

  constructor({ threads }: SessionOptions, loader: WeightLoader) {
    this.threads = threads
    this.#loader = loader
  }

  /**
   * Maps or reads a rank's slice. For float32 it keeps the dtype of its file; for bfloat16 it is rounded to that.
   *
   * @throws RankwiseError `DTYPE_UNSUPPORTED` unless `dtype` is float32 or bfloat16, `BACKEND_MAPPING` when weights must be mapped,
   *   `BACKEND_DISPOSED`, `ABORTED`, and those of the source
   */
  async loadShard(source: ShardSource, { dtype, signal }: LoadShardOptions): Promise<DeviceTensor> {
    this.#requireAlive()
    const content = await this.#loader.load(source, { dtype: computeDType(dtype, source.name), signal })
    const weight = new WeightTensor(content, (freed) => this.#weights.delete(freed))
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
    const executable = await OrtExecutable.compile(segment, {
      threads: this.threads,
      parameters,
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

  /**
   * The tensor itself; of a weight that is mapped, a copy. Weights are in the dtype they are kept in.
   *
   * @throws RankwiseError `TENSOR_DISPOSED`, `TENSOR_FOREIGN`
   */
  async download(tensor: DeviceTensor): Promise<Tensor> {
    return tensor instanceof WeightTensor ? tensor.whole() : HostTensor.from(tensor).tensor
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

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
import type { Engine, EngineName } from './engine/engine.ts'
import type { EngineSelection, SelectedEngine } from './engine/engine-selection.ts'
import { OrtExecutable } from './executable.ts'
import { computeDType } from './host-dtype.ts'
import { HostTensor } from './host-tensor.ts'
import type { WeightLoader } from './weight-loader.ts'
import { WeightTensor } from './weight-tensor.ts'

/** Runs segments on ONNX Runtime's CPU provider, in float32 or bfloat16. Made by {@link ort}. */
export class OrtBackend implements Backend {
  /** `ort-capi` or `ort-binding`. */
  readonly name: string
  readonly supports: Capabilities = { dtypes: ['float32', 'bfloat16'] }
  /** Threads that one operation runs on. */
  readonly threads: number
  /** What calls ONNX Runtime, and why not something else. */
  readonly selection: EngineSelection
  readonly #engine: Engine
  readonly #loader: WeightLoader
  readonly #weights = new Set<WeightTensor>()
  readonly #executables = new Set<OrtExecutable>()
  readonly #compiling = new Set<Promise<Executable>>()
  #disposing: Promise<void> | undefined
  #isDisposed = false

  constructor({ engine, selection }: SelectedEngine, loader: WeightLoader) {
    this.name = `ort-${engine.name}`
    this.threads = engine.threads
    this.selection = selection
    this.#engine = engine
    this.#loader = loader
  }

  /** What calls ONNX Runtime. */
  get engine(): EngineName {
    return this.#engine.name
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
    const compiling = this.#compile(segment, parameters)
    this.#compiling.add(compiling)
    try {
      return await compiling
    } finally {
      this.#compiling.delete(compiling)
    }
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
    return tensor instanceof WeightTensor ? tensor.whole() : HostTensor.from(tensor).give()
  }

  /**
   * The memory of a value, to be read and written to until it is disposed.
   *
   * @throws RankwiseError `TENSOR_DISPOSED`, `TENSOR_FOREIGN`
   */
  borrow(tensor: DeviceTensor): Tensor {
    return HostTensor.from(tensor).tensor
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
    const executable = await OrtExecutable.compile(segment, {
      engine: this.#engine,
      parameters,
      onDispose: (disposed) => this.#executables.delete(disposed),
    })
    if (this.#isDisposed) await executable.dispose()
    this.#requireAlive()
    this.#executables.add(executable)
    return executable
  }

  async #free(): Promise<void> {
    for (const weight of this.#weights) weight.dispose()
    await Promise.allSettled(this.#compiling)
    await Promise.all([...this.#executables].map((executable) => executable.dispose()))
    await this.#engine.dispose()
  }

  #requireAlive(): void {
    if (this.#isDisposed) throw new RankwiseError('BACKEND_DISPOSED', 'the backend ort was disposed')
  }
}

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
import { computeDType, elementDType, valueDType } from './device-dtype.ts'
import { TfjsTensor } from './device-tensor.ts'
import type { Engine, EngineName } from './engine.ts'
import type { EngineSelection } from './engine-selection.ts'
import { TfjsExecutable } from './executable.ts'
import { WeightStore } from './weight-store.ts'

/** Runs segments on TensorFlow's native library or on WebAssembly, kernel by kernel. Made by {@link tfjs}. */
export class TfjsBackend implements Backend {
  /** `tfjs-wasm`, `tfjs-native` or `tfjs-native-gpu`. */
  readonly name: string
  /** float32, and bfloat16 where the engine can round to it. */
  readonly supports: Capabilities
  /** What computes, and why not something else. */
  readonly selection: EngineSelection
  /** Threads that one operation runs on. */
  readonly threads: number
  readonly #engine: Engine
  readonly #weights: WeightStore
  readonly #executables = new Set<TfjsExecutable>()
  #isDisposed = false

  constructor(engine: Engine, selection: EngineSelection) {
    this.name = `tfjs-${engine.name}`
    this.selection = selection
    this.threads = engine.threads
    this.supports = { dtypes: engine.dtypes }
    this.#engine = engine
    this.#weights = new WeightStore(engine)
  }

  /** What computes. */
  get engine(): EngineName {
    return this.#engine.name
  }

  /** Refuses shards that do not fit, before any of them is read. @throws RankwiseError `BACKEND_MEMORY`, `BACKEND_DISPOSED` */
  requireRoom(sources: readonly ShardSource[]): void {
    this.#requireAlive()
    this.#weights.requireRoom(sources)
  }

  /**
   * Reads a rank's slice, rounds it to `dtype`, and keeps it in the order and dtype that the engine's kernels take.
   *
   * @throws RankwiseError `DTYPE_UNSUPPORTED` unless `dtype` is one of `supports`, `BACKEND_MEMORY`, `BACKEND_DISPOSED`, `ABORTED`, and
   *   those of the source
   */
  async loadShard(source: ShardSource, { dtype, signal }: LoadShardOptions): Promise<DeviceTensor> {
    this.#requireAlive()
    const weight = await this.#weights.load(source, { dtype: computeDType(dtype, source.name, this.#engine), signal })
    if (this.#isDisposed) weight.dispose()
    this.#requireAlive()
    return weight
  }

  /**
   * Checks a segment and moves its constants into the engine. Nothing is cached here.
   *
   * @throws RankwiseError `OP_UNSUPPORTED`, `DTYPE_UNSUPPORTED`, `ARGUMENT_MISMATCH` when the weights are not those of the
   *   segment, `TENSOR_FOREIGN`, `TENSOR_DISPOSED`, `BACKEND_DISPOSED`
   */
  async compile(segment: Segment, parameters?: readonly DeviceTensor[]): Promise<Executable> {
    this.#requireAlive()
    const onDispose = (disposed: TfjsExecutable) => this.#executables.delete(disposed)
    const executable = new TfjsExecutable(segment, { engine: this.#engine, onDispose })
    this.#executables.add(executable)
    try {
      if (parameters !== undefined) executable.checkParameters(parameters)
    } catch (error) {
      await executable.dispose()
      throw error
    }
    return executable
  }

  /** Moves a tensor into the engine. @throws RankwiseError `DTYPE_UNSUPPORTED`, `BACKEND_MEMORY`, `BACKEND_DISPOSED` */
  upload(tensor: Tensor): DeviceTensor {
    this.#requireAlive()
    const { shape } = tensor
    const dtype = valueDType(tensor.dtype, 'tensor', this.#engine)
    const elements = elementDType(dtype)
    const ref = this.#engine.write(elements, shape, tensor.cast(elements).data)
    return new TfjsTensor({ engine: this.#engine, ref, dtype, shape })
  }

  /** A copy. Weights are in the dtype that they are computed in, or bfloat16 where they are kept so. @throws RankwiseError `TENSOR_DISPOSED`, `TENSOR_FOREIGN` */
  async download(tensor: DeviceTensor): Promise<Tensor> {
    return TfjsTensor.from(tensor, this.#engine).download()
  }

  /** Weights that are loaded and segments that are compiled now. */
  memory(): MemoryReport {
    return { weightBytes: this.#weights.bytes, mappedBytes: 0, executables: this.#executables.size }
  }

  /** Frees weights and executables; idempotent. Runs that are under way are waited for. */
  async dispose(): Promise<void> {
    this.#isDisposed = true
    this.#weights.dispose()
    await Promise.all([...this.#executables].map((executable) => executable.dispose()))
  }

  /** `dispose`, for `await using`. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.dispose()
  }

  #requireAlive(): void {
    if (this.#isDisposed) throw new RankwiseError('BACKEND_DISPOSED', `the backend ${this.name} was disposed`)
  }
}

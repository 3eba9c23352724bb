import type { ShardSource } from './checkpoint/shard-source.ts'
import type { DeviceMemory } from './device-buffer.ts'
import type { DType } from './dtype.ts'
import type { Segment } from './segment.ts'
import type { Shape, Tensor } from './tensor.ts'

/** What a backend can do; a model that needs more is refused before anything is loaded. */
export interface Capabilities {
  /** Dtypes it computes in. */
  readonly dtypes: readonly DType[]
}

/** A tensor where the backend computes: host memory, a GPU, … */
export interface DeviceTensor {
  readonly dtype: DType
  readonly shape: Shape
  /**
   * How a weight is stored, as far as compiled code depends on it: a dtype, a number of pieces. Executables are shared by
   * weights of equal storage. @default its dtype
   */
  readonly storage?: string
  /** Frees its memory; using it afterwards is an error. Idempotent. */
  dispose(): void
}

/** What a backend holds now. */
export interface MemoryReport {
  /** Bytes of weights that are loaded now and in memory of this process. */
  readonly weightBytes: number
  /** Bytes of weights that lie in mapped files: the processes of a machine share them, and they cost no memory of their own. */
  readonly mappedBytes: number
  /** Segments that are compiled now. */
  readonly executables: number
}

/** A compiled segment. It holds no weights, so blocks of equal structure share one. */
export interface Executable {
  /**
   * Runs once; arguments and results are in the order of `segment.inputs`, `.parameters` and `.outputs`. Results share
   * memory neither with arguments nor with each other: an all-reduce writes into them. Inputs stay as they are.
   *
   * @throws RankwiseError `ARGUMENT_MISMATCH`, `TENSOR_FOREIGN`, `TENSOR_DISPOSED`, `EXECUTABLE_DISPOSED`
   */
  run(inputs: readonly DeviceTensor[], parameters: readonly DeviceTensor[]): Promise<readonly DeviceTensor[]>
  /** Frees what compiling took; idempotent. */
  dispose(): Promise<void>
}

/** How `loadShard` loads. */
export interface LoadShardOptions {
  /** What the weight is computed in. A backend may keep it in the dtype of the file and cast it when it computes. */
  readonly dtype: DType
  readonly signal?: AbortSignal | undefined
}

/**
 * What executes segments. It knows neither ranks nor placements: shapes and slices it is given are local. The tests of
 * `@rankwise/conformance` check all that is promised here; `HostBackend` is the part that backends in host memory share.
 */
export interface Backend extends AsyncDisposable {
  readonly name: string
  readonly supports: Capabilities
  /**
   * Refuses shards that do not fit beside what is loaded. Called with all shards of a model before the first is read.
   * @default everything fits
   */
  requireRoom?(sources: readonly ShardSource[]): void
  /**
   * Loads a rank's slice of one checkpoint tensor. A dtype that it does not compute in is refused before anything is read.
   *
   * @throws RankwiseError `DTYPE_UNSUPPORTED`, `ABORTED`, `BACKEND_DISPOSED`, and those of the source
   */
  loadShard(source: ShardSource, options: LoadShardOptions): Promise<DeviceTensor>
  /**
   * Compiles the operations between two all-reduces.
   *
   * @param parameters - weights of the first run, in the order of `segment.parameters`; those of later runs have the same
   *   storage. @default weights stored in the dtype that the segment computes in
   * @throws RankwiseError `OP_UNSUPPORTED` with the path of the module, `DTYPE_UNSUPPORTED`, `ARGUMENT_MISMATCH`,
   *   `BACKEND_DISPOSED`
   */
  compile(segment: Segment, parameters?: readonly DeviceTensor[]): Promise<Executable>
  /** Takes a host tensor over; the caller does not write to it any more. @throws RankwiseError `BACKEND_DISPOSED` */
  upload(tensor: Tensor): DeviceTensor
  /**
   * The content of a tensor, on the host, for good: nothing that is computed later is written over it.
   *
   * @throws RankwiseError `TENSOR_DISPOSED`, `TENSOR_FOREIGN`
   */
  download(tensor: DeviceTensor): Promise<Tensor>
  /**
   * The memory of a value, where that is memory of the host: an all-reduce writes to it, and nothing keeps it after the
   * value is disposed. @default an all-reduce downloads and uploads
   *
   * @throws RankwiseError `TENSOR_DISPOSED`, `TENSOR_FOREIGN`
   */
  borrow?(tensor: DeviceTensor): Tensor
  /**
   * Where values are, if that is memory of a GPU that others can work on. Collectives that can all-reduce there do so; with
   * others an all-reduce downloads and uploads. @default values are elsewhere
   */
  readonly deviceMemory?: DeviceMemory
  /** What is loaded and compiled now; back at zero after everything is disposed. */
  memory(): MemoryReport
  /** Frees weights and executables, after the runs that are under way; idempotent. */
  dispose(): Promise<void>
}

import type { DType } from '../dtype.ts'
import type { ShardSlices } from '../placement.ts'
import type { Shape, Tensor } from '../tensor.ts'
import type { ReadOptions } from './byte-reader.ts'
import type { ReadStats } from './read-stats.ts'
import type { ByteRange } from './shard-layout.ts'
import type { TensorInfo } from './tensor-info.ts'

/** A rank's part of one tensor of a checkpoint: what a backend loads a weight from. Nothing is read until it asks. */
export interface ShardSource {
  readonly name: string
  /** Absolute path of the file. */
  readonly file: string
  /** As stored; a backend casts after slicing. */
  readonly dtype: DType
  /** Of the whole tensor. */
  readonly fullShape: Shape
  /** The rank's rows or columns; `undefined` when it holds the whole tensor. */
  readonly slices: ShardSlices | undefined
  /** Of the part. */
  readonly shape: Shape
  /** Of the part. */
  readonly byteLength: number
  /**
   * The part's bytes in the file, in order, for backends that map files; `undefined` when the part is strided, so that
   * it must be read. Offsets count from the start of the file and are aligned to nothing.
   */
  ranges(): readonly ByteRange[] | undefined
  /**
   * Reads the part into memory of its own.
   *
   * @throws RankwiseError as `SafetensorsFile.read`
   */
  read(options?: ReadOptions): Promise<Tensor>
}

/** The weights of one model, wherever they are: files of a folder, files of a hub, the memory of this process. */
export interface WeightSource extends AsyncDisposable {
  /** Folder or address, for messages. */
  readonly location: string
  readonly tensors: ReadonlyMap<string, TensorInfo>
  /** What reading has cost so far. */
  readonly stats: ReadStats
  /**
   * A rank's part of a tensor, to be read later.
   *
   * @throws RankwiseError `TENSOR_NOT_FOUND`, `SAFETENSORS_DTYPE_UNSUPPORTED`, `SHARD_SLICES`
   */
  source(name: string, slices?: ShardSlices): ShardSource
}

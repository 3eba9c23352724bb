import type { DType } from '../dtype.ts'
import type { ShardSlices } from '../placement.ts'
import type { Shape, Tensor } from '../tensor.ts'
import type { ReadOptions } from './byte-reader.ts'
import type { ByteRange } from './shard-layout.ts'

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

import { resolve } from 'node:path'
import { allocate, itemSize } from '../dtype.ts'
import { RankwiseError } from '../errors.ts'
import type { ShardSlices } from '../placement.ts'
import { sizeOf, Tensor } from '../tensor.ts'
import { ByteReader, type ReadOptions } from './byte-reader.ts'
import { readHeader } from './read-header.ts'
import { ReadStats } from './read-stats.ts'
import type { SafetensorsHeader } from './safetensors-header.ts'
import { contiguousRanges, type ShardLayout, shardLayout, shardRuns } from './shard-layout.ts'
import { readStrided } from './strided-read.ts'
import { type ReadableTensorInfo, readableTensor, type TensorInfo, whereIs } from './tensor-info.ts'

/** Options of `SafetensorsFile.open`. */
export interface SafetensorsFileOptions {
  /** Where reads are counted. @default a new one */
  readonly stats?: ReadStats
}

/** An open safetensors file whose header has been checked. */
export class SafetensorsFile implements AsyncDisposable {
  /** Absolute. */
  readonly path: string
  /** By position in the file. */
  readonly tensors: ReadonlyMap<string, TensorInfo>
  /** The free-form strings of the header, `{ format: 'pt' }` in most. */
  readonly metadata: ReadonlyMap<string, string>
  readonly stats: ReadStats
  readonly #reader: ByteReader

  private constructor(reader: ByteReader, header: SafetensorsHeader, stats: ReadStats) {
    this.path = reader.path
    this.tensors = header.tensors
    this.metadata = header.metadata
    this.stats = stats
    this.#reader = reader
  }

  /**
   * Opens a file and checks its header; reads no tensor.
   *
   * @param path Absolute, or relative to the working directory.
   * @throws RankwiseError `SAFETENSORS_OPEN`, `SAFETENSORS_READ`, and those of the header: `SAFETENSORS_TRUNCATED`,
   *   `SAFETENSORS_HEADER_LENGTH`, `SAFETENSORS_HEADER_JSON`, `SAFETENSORS_DUPLICATE_KEY`, `SAFETENSORS_METADATA`,
   *   `SAFETENSORS_DTYPE`, `SAFETENSORS_SHAPE`, `SAFETENSORS_OFFSETS`, `SAFETENSORS_OVERLAP`, `SAFETENSORS_HOLE`
   */
  static async open(path: string, options: SafetensorsFileOptions = {}): Promise<SafetensorsFile> {
    const { stats = new ReadStats() } = options
    const reader = await ByteReader.open(resolve(path))
    try {
      const header = await readHeader(reader, stats)
      return new SafetensorsFile(reader, header, stats)
    } catch (error) {
      await reader.close()
      throw error
    }
  }

  /**
   * Reads a tensor in the dtype it is stored in, or the part of it that `slices` name: only the bytes of the part, into
   * the result, which is all that is allocated.
   *
   * @throws RankwiseError `TENSOR_NOT_FOUND`, `SAFETENSORS_DTYPE_UNSUPPORTED`, `SHARD_SLICES`,
   *   `SAFETENSORS_TRUNCATED` when the file has become shorter, `SAFETENSORS_TOO_LARGE`, `SAFETENSORS_READ`,
   *   `SAFETENSORS_CLOSED`, `ABORTED`
   */
  async read(name: string, slices?: ShardSlices, options: ReadOptions = {}): Promise<Tensor> {
    const info = readableTensor(this.tensors, name, this.path)
    const where = whereIs(info.file, name)
    const layout = shardLayout(info.shape, itemSize(info.dtype), slices, where)
    const tensor = this.#allocate(info, layout, where)
    const { buffer, byteOffset, byteLength } = tensor.data
    await this.#fill(new Uint8Array(buffer, byteOffset, byteLength), info, layout, options)
    this.stats.tensorsRead++
    return tensor
  }

  /** Closes the file once its pending reads have ended; idempotent. */
  close(): Promise<void> {
    return this.#reader.close()
  }

  /** Closes the file, for `await using`. */
  [Symbol.asyncDispose](): Promise<void> {
    return this.close()
  }

  #allocate({ name, dtype }: ReadableTensorInfo, { shape, byteLength }: ShardLayout, where: string): Tensor {
    try {
      const data = allocate(dtype, sizeOf(shape))
      this.stats.countBuffer(name, byteLength)
      return new Tensor(dtype, shape, data)
    } catch (cause) {
      if (!(cause instanceof RangeError)) throw cause
      throw new RankwiseError('SAFETENSORS_TOO_LARGE', 'there is no memory for the tensor', {
        where,
        actual: { bytes: byteLength, shape },
        cause,
      })
    }
  }

  async #fill(target: Uint8Array, info: TensorInfo, layout: ShardLayout, options: ReadOptions): Promise<void> {
    const { stats } = this
    const where = whereIs(info.file, info.name)
    if (contiguousRanges(layout) === undefined) {
      const strided = { reader: this.#reader, start: info.byteOffset, target, where, stats }
      return readStrided(shardRuns(layout), strided, options)
    }
    for (const { offset, length, target: at } of shardRuns(layout)) {
      await this.#reader.readInto(target.subarray(at, at + length), info.byteOffset + offset, where, options)
      stats.bytesRead += length
    }
  }
}

/**
 * Reads all tensors of a file.
 *
 * @throws RankwiseError as `SafetensorsFile.open` and `SafetensorsFile.read`
 */
export async function readSafetensors(path: string, options: ReadOptions = {}): Promise<Map<string, Tensor>> {
  await using file = await SafetensorsFile.open(path)
  const tensors = new Map<string, Tensor>()
  for (const name of file.tensors.keys()) tensors.set(name, await file.read(name, undefined, options))
  return tensors
}

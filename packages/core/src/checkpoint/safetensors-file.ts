import { resolve } from 'node:path'
import { allocate, itemSize } from '../dtype.ts'
import { RankwiseError } from '../errors.ts'
import type { ShardSlices } from '../placement.ts'
import { sizeOf, Tensor } from '../tensor.ts'
import { ByteReader, type ReadOptions } from './byte-reader.ts'
import { ReadStats } from './read-stats.ts'
import { LENGTH_BYTES, parseHeader, parseHeaderLength, type SafetensorsHeader } from './safetensors-header.ts'
import { type ByteRange, planReads, type ShardLayout, shardLayout } from './shard-layout.ts'
import { type ReadableTensorInfo, readableTensor, type TensorInfo, whereIs } from './tensor-info.ts'

/**
 * Most bytes of the buffer that strided shards are gathered from. To gather half the columns of a 302 MB weight took
 * 150-165 ms through windows of 1 to 16 MiB, and 243 ms through 64 MiB, which leaves the CPU's caches.
 */
export const DEFAULT_WINDOW_BYTES = 1024 * 1024

const MAX_WINDOW_BYTES = 64 * 1024 * 1024

/** Options of `SafetensorsFile.open`. */
export interface SafetensorsFileOptions {
  /** Where reads are counted. @default a new one */
  readonly stats?: ReadStats
  /**
   * Most bytes of the buffer that strided shards are gathered from, at most 64 MiB.
   * @default 1 MiB
   */
  readonly windowBytes?: number
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
  readonly #windowBytes: number

  private constructor(reader: ByteReader, header: SafetensorsHeader, stats: ReadStats, windowBytes: number) {
    this.path = reader.path
    this.tensors = header.tensors
    this.metadata = header.metadata
    this.stats = stats
    this.#reader = reader
    this.#windowBytes = windowBytes
  }

  /**
   * Opens a file and checks its header; reads no tensor.
   *
   * @param path Absolute, or relative to the working directory.
   * @throws RankwiseError `SAFETENSORS_OPEN`, `SAFETENSORS_READ`, `SAFETENSORS_WINDOW` when `windowBytes` is out of
   *   range, and those of the header: `SAFETENSORS_TRUNCATED`, `SAFETENSORS_HEADER_LENGTH`, `SAFETENSORS_HEADER_JSON`,
   *   `SAFETENSORS_DUPLICATE_KEY`, `SAFETENSORS_METADATA`, `SAFETENSORS_DTYPE`, `SAFETENSORS_SHAPE`,
   *   `SAFETENSORS_OFFSETS`, `SAFETENSORS_OVERLAP`, `SAFETENSORS_HOLE`
   */
  static async open(path: string, options: SafetensorsFileOptions = {}): Promise<SafetensorsFile> {
    const { stats = new ReadStats(), windowBytes = DEFAULT_WINDOW_BYTES } = options
    checkWindow(windowBytes)
    const reader = await ByteReader.open(resolve(path))
    try {
      const header = await readHeader(reader, stats)
      return new SafetensorsFile(reader, header, stats, windowBytes)
    } catch (error) {
      await reader.close()
      throw error
    }
  }

  /**
   * Reads a tensor in the dtype it is stored in, or the part of it that `slices` name. Only the result and, for a
   * strided part, one window of at most `windowBytes` are allocated; the window is never larger than the result.
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
    const where = whereIs(info.file, info.name)
    const windowBytes = Math.min(this.#windowBytes, layout.byteLength)
    let window: Uint8Array | undefined
    for (const read of planReads(layout, windowBytes)) {
      const offset = info.byteOffset + read.offset
      if (read.runs.length === 1) {
        await this.#reader.readInto(target.subarray(read.target, read.target + read.length), offset, where, options)
      } else {
        window ??= this.#allocateWindow(info.name, windowBytes)
        await this.#reader.readInto(window.subarray(0, read.length), offset, where, options)
        gather(target, read.target, window, read.runs)
      }
      this.stats.bytesRead += read.length
    }
  }

  #allocateWindow(name: string, bytes: number): Uint8Array {
    this.stats.countBuffer(name, bytes)
    return new Uint8Array(bytes)
  }
}

function checkWindow(windowBytes: number): void {
  if (Number.isInteger(windowBytes) && windowBytes >= 1 && windowBytes <= MAX_WINDOW_BYTES) return
  throw new RankwiseError('SAFETENSORS_WINDOW', 'windowBytes is out of range', {
    actual: { windowBytes },
    rule: `windowBytes is an integer from 1 to ${MAX_WINDOW_BYTES}`,
  })
}

async function readHeader(reader: ByteReader, stats: ReadStats): Promise<SafetensorsHeader> {
  const where = `${reader.path}, header`
  const start = new Uint8Array(Math.min(LENGTH_BYTES, reader.size))
  await reader.readInto(start, 0, where)
  const bytes = new Uint8Array(LENGTH_BYTES + parseHeaderLength(start, reader.path, reader.size))
  await reader.readInto(bytes, 0, where)
  stats.headerBytes += start.length + bytes.length
  return parseHeader(bytes, reader.path, reader.size)
}

/** Copies the runs of a window to where they belong in the shard: one after the other from `start` on. */
function gather(target: Uint8Array, start: number, window: Uint8Array, runs: readonly ByteRange[]): void {
  let position = start
  for (const { offset, length } of runs) {
    target.set(window.subarray(offset, offset + length), position)
    position += length
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

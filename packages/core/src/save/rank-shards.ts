import { ByteReader, type ReadOptions } from '../checkpoint/byte-reader.ts'
import { readHeader } from '../checkpoint/read-header.ts'
import type { ReadStats } from '../checkpoint/read-stats.ts'
import type { SafetensorsHeader } from '../checkpoint/safetensors-header.ts'
import type { ShardRun } from '../checkpoint/shard-layout.ts'
import { readStrided } from '../checkpoint/strided-read.ts'
import { type TensorInfo, whereIs } from '../checkpoint/tensor-info.ts'
import { RankwiseError } from '../errors.ts'
import { sameShape } from '../tensor.ts'
import { metadataOfRank, type ShardManifest, tensorsOfRank } from './shard-manifest.ts'

/** The open file with the shards of one rank, checked against the manifest of its save. */
export class RankShards implements AsyncDisposable {
  /** Absolute path. */
  readonly file: string
  readonly #tensors: ReadonlyMap<string, TensorInfo>
  readonly #reader: ByteReader
  readonly #stats: ReadStats

  private constructor(reader: ByteReader, tensors: ReadonlyMap<string, TensorInfo>, stats: ReadStats) {
    this.file = reader.path
    this.#tensors = tensors
    this.#reader = reader
    this.#stats = stats
  }

  /**
   * Opens the file of a rank; reads no tensor.
   *
   * @throws RankwiseError `SHARDS_FILE` when it is not the one that the manifest means, and those of
   *   `SafetensorsFile.open`
   */
  static async open(path: string, manifest: ShardManifest, rank: number, stats: ReadStats): Promise<RankShards> {
    const reader = await ByteReader.open(path)
    try {
      checkSize(reader, manifest, rank)
      const header = await readHeader(reader, stats)
      checkMetadata(header, manifest, rank, path)
      checkTensors(header, manifest, rank, path)
      return new RankShards(reader, header.tensors, stats)
    } catch (error) {
      await reader.close()
      throw error
    }
  }

  /** Where a tensor begins, from the start of the file. */
  offsetOf(name: string): number {
    return (this.#tensors.get(name) as TensorInfo).byteOffset
  }

  /**
   * Reads parts of a tensor to their places in another, and nothing between them.
   *
   * @param runs Of the tensor in this file, ascending; where they go is in `target`.
   * @throws RankwiseError `SAFETENSORS_TRUNCATED`, `SAFETENSORS_READ`, `SAFETENSORS_CLOSED`, `ABORTED`
   */
  async gather(target: Uint8Array, name: string, runs: Iterable<ShardRun>, options: ReadOptions): Promise<void> {
    const where = whereIs(this.file, name)
    const strided = { reader: this.#reader, start: this.offsetOf(name), target, where, stats: this.#stats }
    await readStrided(runs, strided, options)
  }

  /** Closes the file once its pending reads have ended; idempotent. */
  [Symbol.asyncDispose](): Promise<void> {
    return this.#reader.close()
  }
}

function checkSize({ path, size }: ByteReader, { files }: ShardManifest, rank: number): void {
  const bytes = files[rank]?.bytes
  if (size !== bytes) throw foreign(path, { bytes: size, savedBytes: bytes })
}

function checkMetadata({ metadata }: SafetensorsHeader, manifest: ShardManifest, rank: number, path: string): void {
  for (const [key, saved] of Object.entries(metadataOfRank(manifest, rank))) {
    const actual = metadata.get(key)
    if (actual !== saved) throw foreign(path, { [key]: actual ?? 'missing', saved })
  }
}

function checkTensors({ tensors }: SafetensorsHeader, manifest: ShardManifest, rank: number, path: string): void {
  const expected = tensorsOfRank(manifest, rank)
  const extra = [...tensors.keys()].find((name) => !expected.has(name))
  if (extra !== undefined) throw foreign(whereIs(path, extra), { saved: 'no such tensor' })
  for (const [name, { dtype, shape }] of expected) {
    const info = tensors.get(name)
    if (info?.dtype === dtype && sameShape(info.shape, shape)) continue
    const actual = info === undefined ? 'missing' : `${info.dtype} [${info.shape.join(', ')}]`
    throw foreign(whereIs(path, name), { tensor: actual, saved: `${dtype} [${shape.join(', ')}]` })
  }
}

function foreign(where: string, actual: Readonly<Record<string, unknown>>): RankwiseError {
  return new RankwiseError('SHARDS_FILE', 'the file is not the one that was saved with the manifest', {
    where,
    actual,
    rule: 'all files in a folder of shards come from one save',
    remedy: 'copy all files of one save again, or save again',
  })
}

import { join, resolve } from 'node:path'
import { resolveFile } from '../checkpoint/checkpoint-files.ts'
import { ReadStats } from '../checkpoint/read-stats.ts'
import { type ByteRange, shardLayout } from '../checkpoint/shard-layout.ts'
import type { ShardSource, WeightSource } from '../checkpoint/shard-source.ts'
import { readableTensor, type TensorInfo, whereIs } from '../checkpoint/tensor-info.ts'
import { allocate, itemSize } from '../dtype.ts'
import { RankwiseError } from '../errors.ts'
import type { ShardSlices } from '../placement.ts'
import { byteSizeOf, sizeOf, Tensor } from '../tensor.ts'
import { type GatherPlan, gatherPlan } from './gather-plan.ts'
import { RankShards } from './rank-shards.ts'
import { isWriter, readManifest, type SavedParameter, type ShardManifest } from './shard-manifest.ts'
import { manifestFile } from './weight-files.ts'

/** Options of `ShardedCheckpoint.open`. */
export interface ShardedCheckpointOptions {
  /** Base name of the files. @default 'diffusion_pytorch_model' */
  readonly weightsName?: string
}

/**
 * The weights of a model that its ranks have saved, each its own shards. They can be read at any degree and in any
 * slices: a part is put together from the ranks' files that have something of it, and only that is read.
 */
export class ShardedCheckpoint implements WeightSource {
  /** Absolute path of the folder. */
  readonly location: string
  /** The degree at which it was saved. */
  readonly tpDegree: number
  /** Whole tensors. Each lies, or begins, in the file of rank 0, which is what `file` and `byteOffset` say. */
  readonly tensors: ReadonlyMap<string, TensorInfo>
  /** What reading has cost so far. */
  readonly stats: ReadStats
  readonly #manifest: ShardManifest
  readonly #files: readonly RankShards[]

  private constructor(directory: string, manifest: ShardManifest, files: readonly RankShards[], stats: ReadStats) {
    this.location = directory
    this.tpDegree = manifest.tpDegree
    this.tensors = wholeTensors(manifest, files[0] as RankShards)
    this.stats = stats
    this.#manifest = manifest
    this.#files = files
  }

  /**
   * Opens all ranks' files in a folder and checks them against its manifest; reads no tensor.
   *
   * @throws RankwiseError `SHARDS_MANIFEST`, `SHARDS_VERSION`, `SHARDS_FILE` when a file is not of the same save,
   *   `CHECKPOINT_FILE_MISSING`, `CHECKPOINT_PATH` when the manifest names a file outside the folder, and those of
   *   `SafetensorsFile.open`
   */
  static async open(directory: string, options: ShardedCheckpointOptions = {}): Promise<ShardedCheckpoint> {
    const { weightsName = 'diffusion_pytorch_model' } = options
    const root = resolve(directory)
    const manifest = await readManifest(join(root, manifestFile(weightsName)))
    const stats = new ReadStats()
    const files: RankShards[] = []
    try {
      for (const [rank, { name }] of manifest.files.entries()) {
        files.push(await RankShards.open(await resolveFile(root, name), manifest, rank, stats))
      }
      return new ShardedCheckpoint(root, manifest, files, stats)
    } catch (error) {
      await closeAll(files)
      throw error
    }
  }

  /**
   * A part of a tensor, to be read later.
   *
   * @throws RankwiseError `TENSOR_NOT_FOUND`, `SHARD_SLICES`
   */
  source(name: string, slices?: ShardSlices): ShardSource {
    const { file, dtype, shape: fullShape } = readableTensor(this.tensors, name, this.location)
    const { shape, byteLength } = shardLayout(fullShape, itemSize(dtype), slices, whereIs(file, name))
    const pieces = this.#piecesOf(name, slices)
    return {
      name,
      file: pieces[0]?.shards.file ?? file,
      dtype,
      fullShape,
      slices,
      shape,
      byteLength,
      ranges: () => rangesOf(name, pieces),
      read: async (options = {}) => {
        const tensor = this.#allocate(name, shape)
        const { buffer, byteOffset } = tensor.data
        const target = new Uint8Array(buffer, byteOffset, byteLength)
        for (const { shards, plan } of pieces) await shards.gather(target, name, plan.runs(), options)
        this.stats.tensorsRead++
        return tensor
      },
    }
  }

  /** Closes all files once their pending reads have ended; idempotent. */
  async [Symbol.asyncDispose](): Promise<void> {
    await closeAll(this.#files)
  }

  #piecesOf(name: string, wanted: ShardSlices | undefined): readonly Piece[] {
    const { dtype, shape, placement } = this.#manifest.parameters.get(name) as SavedParameter
    const saved = placement.kind === 'shard' ? placement : undefined
    return this.#files.flatMap((shards, rank) => {
      if (!isWriter(placement, rank, this.tpDegree)) return []
      const plan = gatherPlan({ shape, itemBytes: itemSize(dtype), saved, savedDegree: this.tpDegree, rank, wanted })
      return plan === undefined ? [] : [{ shards, plan }]
    })
  }

  #allocate(name: string, shape: readonly number[]): Tensor {
    const { file, dtype } = readableTensor(this.tensors, name, this.location)
    try {
      const tensor = new Tensor(dtype, shape, allocate(dtype, sizeOf(shape)))
      this.stats.countBuffer(name, tensor.byteLength)
      return tensor
    } catch (cause) {
      if (!(cause instanceof RangeError)) throw cause
      throw new RankwiseError('SAFETENSORS_TOO_LARGE', 'there is no memory for the tensor', {
        where: whereIs(file, name),
        actual: { bytes: byteSizeOf(shape, dtype), shape },
        cause,
      })
    }
  }
}

/** What one file has of a part. */
interface Piece {
  readonly shards: RankShards
  readonly plan: GatherPlan
}

function wholeTensors({ parameters }: ShardManifest, first: RankShards): ReadonlyMap<string, TensorInfo> {
  const tensors = new Map<string, TensorInfo>()
  for (const [name, { dtype, shape }] of parameters) {
    const place = { file: first.file, byteOffset: first.offsetOf(name), byteLength: byteSizeOf(shape, dtype) }
    tensors.set(name, { name, dtype, shape, ...place })
  }
  return tensors
}

/** The bytes of a part in its file; undefined when it is in several, or in every row. */
function rangesOf(name: string, pieces: readonly Piece[]): readonly ByteRange[] | undefined {
  const [piece, ...others] = pieces
  if (piece === undefined) return []
  if (others.length > 0 || !piece.plan.isContiguous) return undefined
  const start = piece.shards.offsetOf(name)
  return [...piece.plan.runs()].map(({ offset, length }) => ({ offset: start + offset, length }))
}

async function closeAll(files: readonly RankShards[]): Promise<void> {
  await Promise.all(files.map((file) => file[Symbol.asyncDispose]()))
}

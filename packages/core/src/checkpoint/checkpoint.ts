import { basename, resolve } from 'node:path'
import { itemSize } from '../dtype.ts'
import { RankwiseError } from '../errors.ts'
import type { ShardSlices } from '../placement.ts'
import type { Tensor } from '../tensor.ts'
import type { ReadOptions } from './byte-reader.ts'
import { findWeights, requireSafetensors, resolveFile } from './checkpoint-files.ts'
import { readCheckpointIndex } from './checkpoint-index.ts'
import { ReadStats } from './read-stats.ts'
import { SafetensorsFile, type SafetensorsFileOptions } from './safetensors-file.ts'
import { contiguousRanges, shardLayout } from './shard-layout.ts'
import type { ShardSource, WeightSource } from './shard-source.ts'
import { readableTensor, type TensorInfo, whereIs } from './tensor-info.ts'

/** Options of `Checkpoint.open`. */
export interface CheckpointOptions {
  /**
   * Name of the weights without `.safetensors`: diffusers writes `diffusion_pytorch_model`, transformers `model`.
   * @default 'diffusion_pytorch_model'
   */
  readonly weightsName?: string
}

/** The weights of one model: a safetensors file, or several with an index. Its files stay open until it is closed. */
export class Checkpoint implements WeightSource {
  /** Absolute path of the folder. */
  readonly location: string
  /** Of all files. */
  readonly tensors: ReadonlyMap<string, TensorInfo>
  /** What reading has cost so far. */
  readonly stats: ReadStats
  /** By absolute path. */
  readonly #files: ReadonlyMap<string, SafetensorsFile>

  private constructor(directory: string, files: readonly SafetensorsFile[], stats: ReadStats) {
    this.location = directory
    this.tensors = new Map(files.flatMap((file) => [...file.tensors]))
    this.stats = stats
    this.#files = new Map(files.map((file) => [file.path, file]))
  }

  /**
   * Opens the weights in a folder and checks all headers, and an index against them; reads no tensor.
   *
   * @throws RankwiseError `CHECKPOINT_NOT_FOUND`, `CHECKPOINT_FORMAT` when the weights are not safetensors,
   *   `CHECKPOINT_INDEX` when the index is malformed, `CHECKPOINT_PATH` when a file lies outside the folder,
   *   `CHECKPOINT_FILE_MISSING`, `CHECKPOINT_INDEX_MISMATCH` when files do not hold what the index says, and those of
   *   `SafetensorsFile.open`
   */
  static async open(directory: string, options: CheckpointOptions = {}): Promise<Checkpoint> {
    const { weightsName = 'diffusion_pytorch_model' } = options
    const root = resolve(directory)
    const stats = new ReadStats()
    const files: SafetensorsFile[] = []
    try {
      const { kind, fileName } = await findWeights(root, weightsName)
      const path = await resolveFile(root, fileName)
      if (kind === 'file') files.push(await SafetensorsFile.open(path, { stats }))
      else await openIndexed(root, path, files, { stats })
      return new Checkpoint(root, files, stats)
    } catch (error) {
      await closeAll(files)
      throw error
    }
  }

  /**
   * Reads a tensor in the dtype it is stored in, or the part of it that `slices` name.
   *
   * @throws RankwiseError as `SafetensorsFile.read`
   */
  async read(name: string, slices?: ShardSlices, options: ReadOptions = {}): Promise<Tensor> {
    const { file } = readableTensor(this.tensors, name, this.location)
    return (this.#files.get(file) as SafetensorsFile).read(name, slices, options)
  }

  /**
   * A rank's part of a tensor, to be read later.
   *
   * @throws RankwiseError `TENSOR_NOT_FOUND`, `SAFETENSORS_DTYPE_UNSUPPORTED`, `SHARD_SLICES`
   */
  source(name: string, slices?: ShardSlices): ShardSource {
    const info = readableTensor(this.tensors, name, this.location)
    const layout = shardLayout(info.shape, itemSize(info.dtype), slices, whereIs(info.file, name))
    return {
      name,
      file: info.file,
      dtype: info.dtype,
      fullShape: info.shape,
      slices,
      shape: layout.shape,
      byteLength: layout.byteLength,
      ranges: () =>
        contiguousRanges(layout)?.map(({ offset, length }) => ({ offset: info.byteOffset + offset, length })),
      read: (options) => this.read(name, slices, options),
    }
  }

  /** Closes all files once their pending reads have ended; idempotent. */
  close(): Promise<void> {
    return closeAll([...this.#files.values()])
  }

  /** Closes the files, for `await using`. */
  [Symbol.asyncDispose](): Promise<void> {
    return this.close()
  }
}

type IndexedFile = Pick<SafetensorsFile, 'path' | 'tensors'>

/** Opens into `files`, so that the caller can close what was open when a later file fails. */
async function openIndexed(
  directory: string,
  indexPath: string,
  files: SafetensorsFile[],
  options: SafetensorsFileOptions,
): Promise<void> {
  const index = await readCheckpointIndex(indexPath)
  requireSafetensors(directory, [...index.keys()])
  const paths = new Map<string, string>()
  for (const fileName of index.keys()) paths.set(fileName, await resolveFile(directory, fileName))
  for (const [fileName, tensors] of index) {
    const file = await SafetensorsFile.open(paths.get(fileName) as string, options)
    files.push(file)
    checkAgainstIndex(file, tensors, indexPath)
  }
}

/** @throws RankwiseError `CHECKPOINT_INDEX_MISMATCH` when a file does not hold what the index says */
export function checkAgainstIndex(file: IndexedFile, mapped: ReadonlySet<string>, indexPath: string): void {
  const missing = [...mapped].find((name) => !file.tensors.has(name))
  if (missing !== undefined) {
    throw mismatch(indexPath, file, missing, 'the index says that the file has this tensor, and it has not')
  }
  const unmapped = [...file.tensors.keys()].find((name) => !mapped.has(name))
  if (unmapped !== undefined) {
    throw mismatch(indexPath, file, unmapped, 'the file has a tensor that the index does not put there')
  }
}

function mismatch(indexPath: string, file: IndexedFile, tensor: string, what: string): RankwiseError {
  return new RankwiseError('CHECKPOINT_INDEX_MISMATCH', what, {
    where: whereIs(file.path, tensor),
    actual: { index: basename(indexPath), tensorsInFile: file.tensors.size },
    rule: 'index and files list the same tensors',
    remedy: 'download the checkpoint again',
  })
}

async function closeAll(files: readonly SafetensorsFile[]): Promise<void> {
  await Promise.all(files.map((file) => file.close()))
}

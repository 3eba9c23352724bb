import { checkAgainstIndex } from '../checkpoint/checkpoint.ts'
import { LENGTH_BYTES, parseHeader, parseHeaderLength } from '../checkpoint/safetensors-header.ts'
import { type ByteRange, shardLayout } from '../checkpoint/shard-layout.ts'
import type { ShardSource, WeightSource } from '../checkpoint/shard-source.ts'
import { readableTensor, type TensorInfo, whereIs } from '../checkpoint/tensor-info.ts'
import { itemSize } from '../dtype.ts'
import type { ShardSlices } from '../placement.ts'
import { indexPath, pathIn, withoutSlashes } from './file-selection.ts'
import { HubReadStats } from './hub-read-stats.ts'
import type { HubRepository } from './hub-repository.ts'
import { requireInteger } from './hub-settings.ts'
import { inParallel } from './parallel.ts'
import { PlannedShard } from './planned-shard.ts'
import type { RangedFile } from './remote-file.ts'
import { ShardFetcher } from './shard-fetcher.ts'

/** Options of `HubCheckpoint.open`. */
export interface HubCheckpointOptions {
  /** Folder of the model in the repository. @default its root */
  readonly subfolder?: string | undefined
  /** Name of the weights without `.safetensors`. @default 'diffusion_pytorch_model' */
  readonly weightsName?: string | undefined
  /**
   * Most bytes of shards in memory that are not read yet, beside the one that is waited for.
   *
   * @default 256 MiB
   */
  readonly prefetchBytes?: number | undefined
  /** Aborts headers and ranges with `ABORTED`. */
  readonly signal?: AbortSignal | undefined
}

const DEFAULT_PREFETCH_BYTES = 256 * 1024 * 1024

/** Files of which the headers are fetched at once. */
const PARALLEL_HEADERS = 4

/** Longest first guess at a header: those of FLUX.2's files have 20 KB. */
const MAX_GUESS_BYTES = 64 * 1024

/** Of a small file the guess is this part, so that what it brings in vain is too. */
const GUESS_FRACTION = 1 / 256

/**
 * The weights of one model on a hub, of which only the parts that are read are fetched, straight into their tensors and
 * past the cache.
 *
 * Take all sources before the first is read, and read them in the order of the files and of their bytes: `source` plans,
 * the first `read` turns the plan into requests, and while one shard is used the next ones are on their way.
 */
export class HubCheckpoint implements WeightSource {
  /** `org/name@commit`, with the folder of the model. */
  readonly location: string
  readonly tensors: ReadonlyMap<string, TensorInfo>
  readonly stats: HubReadStats
  readonly #fetcher: ShardFetcher

  private constructor(
    location: string,
    tensors: ReadonlyMap<string, TensorInfo>,
    stats: HubReadStats,
    fetcher: ShardFetcher,
  ) {
    this.location = location
    this.tensors = tensors
    this.stats = stats
    this.#fetcher = fetcher
  }

  /**
   * Fetches the headers of the weights and checks them, and an index against them; the index alone comes into the
   * cache.
   *
   * @throws RankwiseError `CHECKPOINT_NOT_FOUND`, `CHECKPOINT_FORMAT`, `CHECKPOINT_INDEX`,
   *   `CHECKPOINT_INDEX_MISMATCH`, `HUB_NOT_FOUND` when files of the index are missing, those of the header as `SafetensorsFile.open`, `HUB_NO_RANGES` when the server sends
   *   whole files only, `HUB_OPTION`, `HUB_CHANGED`, `HUB_NETWORK`, `HUB_UNAUTHORIZED`, `HUB_OFFLINE`, `HUB_RESPONSE`, `ABORTED`
   */
  static async open(repository: HubRepository, options: HubCheckpointOptions = {}): Promise<HubCheckpoint> {
    const { weightsName = 'diffusion_pytorch_model', signal } = options
    const folder = withoutSlashes(options.subfolder ?? '')
    const { prefetchBytes = DEFAULT_PREFETCH_BYTES } = options
    requireInteger('prefetchBytes', prefetchBytes, 0, Number.MAX_SAFE_INTEGER)
    const { files, index } = await repository.weightFiles({ folder, weightsName }, { signal })
    const remotes = files.map((file) => repository.remoteFile(file))
    const stats = new HubReadStats()
    const read = (remote: RangedFile, stop: AbortSignal) => readHeader(remote, stats, stop)
    const headers = await inParallel(remotes, read, { limit: PARALLEL_HEADERS, signal })
    for (const [i, { address, file }] of remotes.entries()) {
      const mapped = index?.get(file.path.slice(pathIn(folder, '').length))
      const opened = { path: address, tensors: headers[i] as TensorMap }
      if (mapped !== undefined) checkAgainstIndex(opened, mapped, indexPath(folder, weightsName))
    }
    const fetcher = new ShardFetcher(new Map(remotes.map((remote) => [remote.address, remote])), stats, {
      prefetchBytes,
      signal,
    })
    const location = pathIn(repository.location, folder)
    return new HubCheckpoint(location, new Map(headers.flatMap((tensors) => [...tensors])), stats, fetcher)
  }

  /**
   * A rank's part of a tensor, to be read later. Taking it puts it into the plan: it is fetched along with others even
   * before it is read. `file` is the address of the file, which no backend can map: `ranges` are undefined.
   *
   * @throws RankwiseError `TENSOR_NOT_FOUND`, `SAFETENSORS_DTYPE_UNSUPPORTED`, `SHARD_SLICES`
   */
  source(name: string, slices?: ShardSlices): ShardSource {
    const info = readableTensor(this.tensors, name, this.location)
    const layout = shardLayout(info.shape, itemSize(info.dtype), slices, whereIs(info.file, name))
    let planned: PlannedShard | undefined = this.#add(new PlannedShard(info, layout))
    return {
      name,
      file: info.file,
      dtype: info.dtype,
      fullShape: info.shape,
      slices,
      shape: layout.shape,
      byteLength: layout.byteLength,
      ranges: () => undefined,
      read: (options = {}) => {
        const shard = planned ?? this.#add(new PlannedShard(info, layout))
        planned = undefined
        return this.#fetcher.read(shard, options.signal)
      },
    }
  }

  /** Ends all transfers; idempotent. */
  close(): Promise<void> {
    return this.#fetcher.close()
  }

  /** `close`, for `await using`. */
  [Symbol.asyncDispose](): Promise<void> {
    return this.close()
  }

  #add(shard: PlannedShard): PlannedShard {
    this.#fetcher.add(shard)
    return shard
  }
}

type TensorMap = ReadonlyMap<string, TensorInfo>

/** Mostly in one request: the header's length is only known from its start, so its end is guessed. */
async function readHeader(
  remote: RangedFile,
  stats: HubReadStats,
  signal: AbortSignal | undefined,
): Promise<TensorMap> {
  const { file, address } = remote
  const guess = Math.min(file.size, Math.max(LENGTH_BYTES, Math.min(MAX_GUESS_BYTES, file.size * GUESS_FRACTION)) | 0)
  const start = await readBytes(remote, { offset: 0, length: guess }, stats, signal)
  const length = LENGTH_BYTES + parseHeaderLength(start, address, file.size)
  if (length <= guess) return parseHeader(start, address, file.size).tensors
  const rest = await readBytes(remote, { offset: guess, length: length - guess }, stats, signal)
  return parseHeader(Buffer.concat([start, rest]), address, file.size).tensors
}

async function readBytes(
  remote: RangedFile,
  range: ByteRange,
  stats: HubReadStats,
  signal: AbortSignal | undefined,
): Promise<Uint8Array> {
  const bytes = new Uint8Array(range.length)
  let position = 0
  await remote.read(
    range,
    (chunk) => {
      bytes.set(chunk, position)
      position += chunk.length
    },
    {
      requireRanges: true,
      signal,
      onRequest: () => {
        stats.requests++
      },
      onReceived: (length) => {
        stats.headerBytes += length
      },
    },
  )
  return bytes
}

import { throwIfAborted } from './abort.ts'
import type { Backend, DeviceTensor, LoadShardOptions } from './backend.ts'
import type { ShardSource } from './checkpoint/index.ts'

/** Shards that are loaded at a time: the disk works while a backend casts, which takes 10 to 30 % off such a load. */
const MAX_SHARDS_IN_FLIGHT = 4

/** Bytes of the shards that are loaded at a time, unless one alone has more. */
const MAX_BYTES_IN_FLIGHT = 64 * 1024 * 1024

/** A shard where the backend computes. */
export interface LoadedShard {
  readonly source: ShardSource
  readonly weight: DeviceTensor
  /** Whether the backend read it; otherwise it maps the file. */
  readonly wasRead: boolean
}

/** How `loadShards` loads. */
export interface LoadShardsOptions extends LoadShardOptions {
  readonly backend: Backend
  /** Called after every shard, with the bytes of all that are loaded. */
  readonly onLoaded: (loadedBytes: number) => void
}

/**
 * Loads shards, begun in their order and a few at a time; gives them in their order. When one fails, no other is begun,
 * those under way are waited for, and all that were loaded are freed. The error is that of the first in order: every
 * shard before one that failed was begun before it.
 *
 * @throws RankwiseError `ABORTED`, and those of the backend and the sources
 */
export async function loadShards(
  sources: readonly ShardSource[],
  options: LoadShardsOptions,
): Promise<readonly LoadedShard[]> {
  const loads = new ShardLoads(options)
  for (const source of sources) {
    await loads.room(source.byteLength)
    if (loads.hasFailed) break
    loads.begin(source)
  }
  return loads.finish()
}

/** Shards on their way to a backend. */
class ShardLoads {
  readonly #options: LoadShardsOptions
  /** By position. */
  readonly #loaded = new Map<number, LoadedShard>()
  /** By position. */
  readonly #errors = new Map<number, unknown>()
  readonly #running = new Set<Promise<void>>()
  #begun = 0
  #bytesInFlight = 0
  #loadedBytes = 0

  constructor(options: LoadShardsOptions) {
    this.#options = options
  }

  get hasFailed(): boolean {
    return this.#errors.size > 0
  }

  /** Resolves when a shard of so many bytes may be begun. */
  async room(bytes: number): Promise<void> {
    const isFull = () =>
      this.#running.size >= MAX_SHARDS_IN_FLIGHT ||
      (this.#running.size > 0 && this.#bytesInFlight + bytes > MAX_BYTES_IN_FLIGHT)
    while (isFull()) await Promise.race(this.#running)
  }

  begin(source: ShardSource): void {
    const position = this.#begun
    this.#begun++
    this.#bytesInFlight += source.byteLength
    const running = this.#load(source, position)
      .catch((error: unknown) => {
        this.#errors.set(position, error)
      })
      .finally(() => {
        this.#bytesInFlight -= source.byteLength
        this.#running.delete(running)
      })
    this.#running.add(running)
  }

  async finish(): Promise<readonly LoadedShard[]> {
    await Promise.all(this.#running)
    if (!this.hasFailed) return inOrder(this.#loaded)
    for (const { weight } of this.#loaded.values()) weight.dispose()
    throw inOrder(this.#errors)[0]
  }

  async #load(source: ShardSource, position: number): Promise<void> {
    const { backend, dtype, signal, onLoaded } = this.#options
    throwIfAborted(signal, source.name)
    let wasRead = false
    const noting = notingReads(source, () => {
      wasRead = true
    })
    const weight = await backend.loadShard(noting, { dtype, signal })
    this.#loaded.set(position, { source, weight, wasRead })
    this.#loadedBytes += source.byteLength
    onLoaded(this.#loadedBytes)
  }
}

function inOrder<T>(values: ReadonlyMap<number, T>): readonly T[] {
  return [...values].sort(([a], [b]) => a - b).map(([, value]) => value)
}

/** The source, and word of whether it was read. */
function notingReads(source: ShardSource, onRead: () => void): ShardSource {
  const { name, file, dtype, fullShape, slices, shape, byteLength } = source
  return {
    name,
    file,
    dtype,
    fullShape,
    slices,
    shape,
    byteLength,
    ranges: () => source.ranges(),
    read: (options) => {
      onRead()
      return source.read(options)
    },
  }
}

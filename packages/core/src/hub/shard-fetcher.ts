import { throwIfAborted } from '../abort.ts'
import { whereIs } from '../checkpoint/tensor-info.ts'
import { RankwiseError } from '../errors.ts'
import type { Tensor } from '../tensor.ts'
import type { HubReadStats } from './hub-read-stats.ts'
import type { PlannedShard } from './planned-shard.ts'
import { planRequests, type RangeRequest } from './range-plan.ts'
import type { RangedFile } from './remote-file.ts'
import { shardWindows } from './shard-windows.ts'

/** How `ShardFetcher` fetches. */
export interface ShardFetcherOptions {
  /** Bytes of shards that may be in memory before they are read. */
  readonly prefetchBytes: number
  readonly signal?: AbortSignal | undefined
}

type Request = RangeRequest<PlannedShard>

const PARALLEL_REQUESTS = 4

/**
 * Fetches shards by ranges. All shards that are added before the first is read share one plan, so that neighbours share
 * requests; while one is used, those after it are on their way, within a bound of memory.
 */
export class ShardFetcher {
  /** By the `file` of a tensor. */
  readonly #files: ReadonlyMap<string, RangedFile>
  readonly #stats: HubReadStats
  readonly #prefetchBytes: number
  readonly #stop = new AbortController()
  readonly #signal: AbortSignal
  readonly #active = new Set<Promise<void>>()
  readonly #undelivered = new Set<PlannedShard>()
  #added: PlannedShard[] = []
  #queue: Request[] = []
  /** Requests of shards that someone waits for. */
  #urgent: Request[] = []
  #bufferedBytes = 0
  #failure: unknown

  constructor(files: ReadonlyMap<string, RangedFile>, stats: HubReadStats, options: ShardFetcherOptions) {
    this.#files = files
    this.#stats = stats
    this.#prefetchBytes = options.prefetchBytes
    this.#signal =
      options.signal === undefined ? this.#stop.signal : AbortSignal.any([options.signal, this.#stop.signal])
  }

  /** Takes a shard into the plan. */
  add(shard: PlannedShard): void {
    this.#added.push(shard)
    this.#undelivered.add(shard)
  }

  /**
   * Waits for a shard that was added and hands it over, once. A failure ends the whole fetch: whoever loads a model cannot use the rest.
   *
   * @throws RankwiseError as `RangedFile.read`, `SAFETENSORS_TOO_LARGE`, `SAFETENSORS_CLOSED`, `ABORTED`
   */
  async read(shard: PlannedShard, signal?: AbortSignal): Promise<Tensor> {
    const where = whereIs(shard.info.file, shard.info.name)
    throwIfAborted(signal, where)
    if (this.#failure !== undefined) throw this.#failure
    this.#plan()
    const isUrgent = ({ wanted }: Request) => wanted.some(({ owner }) => owner === shard)
    this.#urgent.push(...this.#queue.filter(isUrgent))
    this.#queue = this.#queue.filter((request) => !isUrgent(request))
    this.#pump()
    await orAborted(shard.arrived, signal, where)
    this.#undelivered.delete(shard)
    if (shard.isAllocated) this.#bufferedBytes -= shard.layout.byteLength
    this.#stats.tensorsRead++
    this.#pump()
    return shard.take()
  }

  /** Ends all transfers; shards that were not read are lost. Idempotent. */
  async close(): Promise<void> {
    this.#fail(new RankwiseError('SAFETENSORS_CLOSED', 'the checkpoint was closed'))
    await Promise.all(this.#active)
  }

  #plan(): void {
    if (this.#added.length === 0) return
    const ranges = this.#added.flatMap((shard) => {
      const { file, byteOffset } = shard.info
      return shardWindows(shard.layout).map(({ offset, length }) => ({
        file,
        offset: byteOffset + offset,
        length,
        owner: shard,
      }))
    })
    const requests = planRequests(ranges)
    const counts = new Map<PlannedShard, number>()
    for (const { wanted } of requests) {
      for (const { owner } of wanted) counts.set(owner, (counts.get(owner) ?? 0) + 1)
    }
    for (const shard of this.#added) shard.expect(counts.get(shard) ?? 0)
    this.#queue.push(...requests)
    this.#added = []
  }

  /** Starts what may be started: urgent requests at once, others while there is memory for what they bring. */
  #pump(): void {
    while (this.#active.size < PARALLEL_REQUESTS && this.#failure === undefined) {
      const request = this.#urgent.shift() ?? this.#nextAhead()
      if (request === undefined) return
      const transfer = this.#fetch(request)
        .catch((error: unknown) => this.#fail(error))
        .finally(() => {
          this.#active.delete(transfer)
          this.#pump()
        })
      this.#active.add(transfer)
    }
  }

  #nextAhead(): Request | undefined {
    const request = this.#queue[0]
    if (request === undefined || this.#bufferedBytes + newBytes(request) > this.#prefetchBytes) return undefined
    return this.#queue.shift()
  }

  async #fetch(request: Request): Promise<void> {
    this.#bufferedBytes += newBytes(request)
    for (const { owner } of request.wanted) {
      owner.allocate()
      this.#stats.countBuffer(owner.info.name, owner.layout.byteLength)
    }
    let position = request.offset
    await (this.#files.get(request.file) as RangedFile).read(
      request,
      (bytes) => {
        hand(request, bytes, position)
        position += bytes.length
      },
      {
        requireRanges: true,
        signal: this.#signal,
        onRequest: () => {
          this.#stats.requests++
        },
        onReceived: (bytes) => {
          this.#stats.bytesRead += bytes
        },
      },
    )
    for (const { owner } of request.wanted) owner.rangeArrived()
  }

  #fail(error: unknown): void {
    if (this.#failure !== undefined) return
    this.#failure = error
    this.#queue = []
    this.#urgent = []
    for (const shard of this.#undelivered) shard.fail(error)
    this.#stop.abort()
  }
}

/** Gives every shard of a request its part of bytes that arrived. */
function hand({ wanted }: Request, bytes: Uint8Array, position: number): void {
  for (const { owner, offset, length } of wanted) {
    const start = Math.max(offset, position)
    const end = Math.min(offset + length, position + bytes.length)
    if (start < end) owner.put(bytes.subarray(start - position, end - position), start)
  }
}

/** Bytes of memory that a request takes, for shards of which nothing was asked for yet. */
function newBytes({ wanted }: Request): number {
  const shards = new Set(wanted.map(({ owner }) => owner).filter(({ isAllocated }) => !isAllocated))
  return [...shards].reduce((sum, { layout }) => sum + layout.byteLength, 0)
}

async function orAborted(arrived: Promise<void>, signal: AbortSignal | undefined, where: string): Promise<void> {
  if (signal === undefined) return arrived
  let onAbort = () => {}
  const aborted = new Promise<void>((resolve) => {
    onAbort = resolve
    signal.addEventListener('abort', onAbort, { once: true })
  })
  try {
    await Promise.race([arrived, aborted])
  } finally {
    signal.removeEventListener('abort', onAbort)
  }
  throwIfAborted(signal, where)
}

import { reduce } from '@rankwise/collectives-local/internals'
import { type DType, itemSize, type ReduceOp, viewAs } from '@rankwise/core'
import { ChunkBuffer } from './chunk-buffer.ts'
import type { Transfer, Transfers } from './transfers.ts'

/** Where the part of each machine lies in a chunk: offsets and lengths in bytes, in machine order. */
export type Segments = readonly { readonly start: number; readonly bytes: number }[]

/** Of how many bytes each machine may send all to all others: more latency would cost more than the bytes do. */
const WHOLE_BYTES = 64 * 2 ** 10
/** Machines reduce whole cache lines. */
const CACHE_LINE = 64

const HEADERS_TAG = 0
const SCATTER_TAG = 1
const GATHER_TAG = 2
/** Two chunks may be on their way at a time; the tags of one are these, those of the other follow them. */
const TAGS_PER_LANE = 3

/**
 * What the leaders of the machines do with a chunk. They move bytes with MPI and add themselves, in machine order: the
 * result has the same bits on every machine, for every dtype, whatever algorithm an MPI library would choose.
 */
export class Leaders {
  readonly #transfers: Transfers
  readonly #machines: number
  readonly #own: number
  /** MPI's number of each leader. */
  readonly #peers: readonly number[]

  constructor(transfers: Transfers, own: number, peers: readonly number[]) {
    this.#transfers = transfers
    this.#machines = peers.length
    this.#own = own
    this.#peers = peers
  }

  /** Sends one block to all other leaders and receives theirs; all blocks lie in `buffer`, in machine order. */
  exchangeHeaders(buffer: ChunkBuffer, segments: Segments): Promise<void> {
    return this.#gather(buffer, segments, HEADERS_TAG)
  }

  /** Replaces the first `bytes` bytes of `chunk` by their reduction over all machines. */
  async allReduce(chunk: Chunk, dtype: DType, op: ReduceOp, bytes: number): Promise<void> {
    if (this.#machines === 2 || bytes <= WHOLE_BYTES) {
      // Between two machines, either way moves the same number of bytes; this one takes one step instead of two.
      const whole = Array.from({ length: this.#machines }, () => ({ start: 0, bytes }))
      return this.reduceScatter(chunk, dtype, op, whole)
    }
    const segments = this.#split(bytes)
    await this.reduceScatter(chunk, dtype, op, segments)
    await this.allGather(chunk, segments)
  }

  /** Replaces this machine's segment of `chunk` by its reduction over all machines. */
  async reduceScatter(chunk: Chunk, dtype: DType, op: ReduceOp, segments: Segments): Promise<void> {
    const { start, bytes } = segments[this.#own] as Segments[number]
    const received = chunk.contributions(bytes * this.#machines)
    received.bytes.set(chunk.data.bytes.subarray(start, start + bytes), this.#own * bytes)
    const transfers = this.#others((machine, peer): Transfer[] => [
      { direction: 'receive', peer, buffer: received, start: machine * bytes, bytes },
      { direction: 'send', peer, buffer: chunk.data, ...(segments[machine] as Segments[number]) },
    ])
    await this.#transfers.run(transfers, chunk.tag(SCATTER_TAG))
    const itemBytes = itemSize(dtype)
    reduce(dtype, op, {
      source: viewAs(dtype, received.bytes),
      first: 0,
      stride: bytes / itemBytes,
      ranks: this.#machines,
      target: viewAs(dtype, chunk.data.bytes),
      targetStart: start / itemBytes,
      count: bytes / itemBytes,
    })
  }

  /** Fills the segments of the other machines. */
  allGather(chunk: Chunk, segments: Segments): Promise<void> {
    return this.#gather(chunk.data, segments, chunk.tag(GATHER_TAG))
  }

  /** Copies the first `bytes` bytes of `chunk` from machine `source` to all others. */
  broadcast(chunk: Chunk, bytes: number, source: number): Promise<void> {
    const span = { buffer: chunk.data, start: 0, bytes }
    const transfers: readonly Transfer[] =
      this.#own === source
        ? this.#others((_, peer): Transfer[] => [{ ...span, direction: 'send', peer }])
        : [{ ...span, direction: 'receive', peer: this.#peers[source] as number }]
    return this.#transfers.run(transfers, chunk.tag(GATHER_TAG))
  }

  #gather(buffer: ChunkBuffer, segments: Segments, tag: number): Promise<void> {
    const transfers = this.#others((machine, peer): Transfer[] => [
      { direction: 'receive', peer, buffer, ...(segments[machine] as Segments[number]) },
      { direction: 'send', peer, buffer, ...(segments[this.#own] as Segments[number]) },
    ])
    return this.#transfers.run(transfers, tag)
  }

  #split(bytes: number): Segments {
    const lines = Math.ceil(bytes / CACHE_LINE)
    const at = (machine: number) => Math.min(Math.floor((lines * machine) / this.#machines) * CACHE_LINE, bytes)
    return this.#peers.map((_, machine) => ({ start: at(machine), bytes: at(machine + 1) - at(machine) }))
  }

  /** Begins with the next machine, so that not all send to one. */
  #others(transfersWith: (machine: number, peer: number) => Transfer[]): Transfer[] {
    const turns = Array.from({ length: this.#machines - 1 }, (_, turn) => (this.#own + 1 + turn) % this.#machines)
    return turns.flatMap((machine) => transfersWith(machine, this.#peers[machine] as number))
  }
}

/** Memory for one chunk on its way through the leaders. */
export class Chunk {
  readonly data: ChunkBuffer
  readonly #lane: number
  #contributions: ChunkBuffer

  /** @param lane 0 or 1: what tells the messages of this chunk from those of the other */
  constructor(byteLength: number, lane: number) {
    this.#lane = lane
    this.data = new ChunkBuffer(byteLength)
    this.#contributions = new ChunkBuffer(0)
  }

  tag(phase: number): number {
    return this.#lane * TAGS_PER_LANE + phase
  }

  /** Room for what the machines contribute. It must not be in use. */
  contributions(byteLength: number): ChunkBuffer {
    if (this.#contributions.byteLength < byteLength) this.#contributions = new ChunkBuffer(byteLength)
    return this.#contributions
  }
}

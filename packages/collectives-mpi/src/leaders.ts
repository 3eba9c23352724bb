import { setImmediate } from 'node:timers/promises'
import type { Reduce } from '@rankwise/collectives-local/internals'
import { type DType, itemSize, type ReduceOp, viewAs } from '@rankwise/core'
import type { Region, Transfer } from './mailbox.ts'
import type { MpiProcess } from './mpi-process.ts'

/** Where the part of each machine lies in a chunk: offsets and lengths in bytes, in machine order. */
export type Segments = readonly { readonly start: number; readonly bytes: number }[]

/** Of how many bytes each machine may send all to all others: more latency would cost more than the bytes do. */
export const WHOLE_BYTES = 64 * 2 ** 10
/** Machines reduce whole cache lines. */
const CACHE_LINE = 64

/** Elements that are reduced at a time; 16-bit floats take 10 ns each in JavaScript. */
const PIECE = 2 ** 17
/** Longest time that a reduction holds the event loop, and about that of a piece. */
const HOLD_MS = 5

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
  readonly #mpi: MpiProcess
  readonly #machines: number
  readonly #own: number
  /** MPI's number of each leader. */
  readonly #peers: readonly number[]
  readonly #reduceArrays: Reduce

  constructor(mpi: MpiProcess, own: number, peers: readonly number[], reduce: Reduce) {
    this.#mpi = mpi
    this.#reduceArrays = reduce
    this.#machines = peers.length
    this.#own = own
    this.#peers = peers
  }

  /** Sends one block to all other leaders and receives theirs; all blocks lie in `headers`, in machine order. */
  exchangeHeaders(headers: Region, segments: Segments): Promise<void> {
    return this.#gather(headers, segments, HEADERS_TAG)
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
    const received = chunk.contributions
    received.bytes.set(chunk.data.bytes.subarray(start, start + bytes), this.#own * bytes)
    const transfers = this.#others((machine, peer): Transfer[] => [
      { direction: 'receive', peer, start: received.start + machine * bytes, bytes },
      { direction: 'send', peer, ...within(chunk.data, segments[machine]) },
    ])
    await this.#mpi.run({ tag: chunk.tag(SCATTER_TAG), transfers })
    await this.#reduce(chunk, dtype, op, { start, bytes })
  }

  /** Fills the segments of the other machines. */
  allGather(chunk: Chunk, segments: Segments): Promise<void> {
    return this.#gather(chunk.data, segments, chunk.tag(GATHER_TAG))
  }

  /** Copies the first `bytes` bytes of `chunk` from machine `source` to all others. */
  broadcast(chunk: Chunk, bytes: number, source: number): Promise<void> {
    const span = { start: chunk.data.start, bytes }
    const transfers: readonly Transfer[] =
      this.#own === source
        ? this.#others((_, peer): Transfer[] => [{ ...span, direction: 'send', peer }])
        : [{ ...span, direction: 'receive', peer: this.#peers[source] as number }]
    return this.#mpi.run({ tag: chunk.tag(GATHER_TAG), transfers })
  }

  /** Adds what the machines have contributed, without holding the event loop for long. */
  async #reduce(chunk: Chunk, dtype: DType, op: ReduceOp, { start, bytes }: Segments[number]): Promise<void> {
    const itemBytes = itemSize(dtype)
    const [source, target] = [viewAs(dtype, chunk.contributions.bytes), viewAs(dtype, chunk.data.bytes)]
    const count = bytes / itemBytes
    const targetStart = start / itemBytes
    let released = performance.now()
    for (let first = 0; first < count; first += PIECE) {
      const end = Math.min(first + PIECE, count)
      const sources = this.#peers.map((_, machine) => source.subarray(machine * count + first, machine * count + end))
      this.#reduceArrays(dtype, op, sources, target.subarray(targetStart + first, targetStart + end))
      if (performance.now() - released < HOLD_MS) continue
      await setImmediate()
      this.#mpi.requireRunning()
      released = performance.now()
    }
  }

  #gather(region: Region, segments: Segments, tag: number): Promise<void> {
    const transfers = this.#others((machine, peer): Transfer[] => [
      { direction: 'receive', peer, ...within(region, segments[machine]) },
      { direction: 'send', peer, ...within(region, segments[this.#own]) },
    ])
    return this.#mpi.run({ tag, transfers })
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

function within(region: Region, segment: Segments[number] | undefined): Segments[number] {
  const { start, bytes } = segment as Segments[number]
  return { start: region.start + start, bytes }
}

/** Memory for one chunk on its way through the leaders. */
export class Chunk {
  readonly data: Region
  /** Room for what the machines contribute to a reduction. */
  readonly contributions: Region
  readonly #lane: number

  /** @param lane 0 or 1: what tells the messages of this chunk from those of the other */
  constructor(data: Region, contributions: Region, lane: number) {
    this.data = data
    this.contributions = contributions
    this.#lane = lane
  }

  tag(phase: number): number {
    return this.#lane * TAGS_PER_LANE + phase
  }
}

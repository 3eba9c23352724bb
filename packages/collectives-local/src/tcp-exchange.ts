import type { DType, ReduceOp, TensorData } from '@rankwise/core'
import { ByteRun } from './byte-run.ts'
import type { DataLink } from './data-link.ts'
import type { DataLinks } from './data-links.ts'
import type { Exchange } from './exchange.ts'
import type { Reduce } from './kernel.ts'
import { bytesOf, reduceBytes } from './reduce-bytes.ts'
import type { Turn } from './turn.ts'

/** Up to this size every rank sends all of it to all others, and each reduces everything: one way instead of two. */
const DIRECT_BYTES = 2 ** 15

/** Stripes start at multiples of this, which every dtype is aligned to. */
const CACHE_LINE = 64

/** Chunks that are on their way at a time. */
const WINDOW = 2

/** What is exchanged with a rank in one chunk. */
interface Stripe {
  readonly start: number
  readonly count: number
}

/**
 * Operations over a connection between every two ranks. Data is sent from the memory of the user and received there, or,
 * to be reduced, in one buffer of `chunkBytes` at most per rank.
 */
export class TcpExchange implements Exchange {
  readonly #links: DataLinks
  readonly #rank: number
  readonly #worldSize: number
  readonly #reduce: Reduce
  readonly #chunkBytes: number
  /** What other ranks contribute to a chunk, by rank. */
  readonly #received: Uint8Array[] = []

  /** @param chunkBytes a multiple of 64, at least `64 * worldSize` */
  constructor(links: DataLinks, rank: number, reduce: Reduce, chunkBytes: number) {
    this.#links = links
    this.#rank = rank
    this.#worldSize = links.worldSize
    this.#reduce = reduce
    this.#chunkBytes = chunkBytes
  }

  barrier(_turn: Turn): Promise<void> {
    return this.#links.verified
  }

  async allReduce(_turn: Turn, dtype: DType, op: ReduceOp, arrays: readonly TensorData[]): Promise<void> {
    const run = new ByteRun(arrays.map(bytesOf))
    if (run.byteLength <= Math.min(DIRECT_BYTES, this.#chunkBytes)) await this.#reduceDirect(dtype, op, run)
    else if (this.#worldSize === 2) await this.#reduceWithOne(dtype, op, run)
    else await this.#reduceStriped(dtype, op, run)
  }

  async allGather(_turn: Turn, input: Uint8Array, output: Uint8Array): Promise<void> {
    for (const { link } of this.#links.peers) link.write(input)
    await this.#links.verified
    const rows = (rank: number) => output.subarray(rank * input.length, (rank + 1) * input.length)
    rows(this.#rank).set(input)
    await Promise.all(this.#links.peers.map(({ rank, link }) => link.read(rows(rank))))
  }

  async reduceScatter(
    _turn: Turn,
    dtype: DType,
    op: ReduceOp,
    inputData: TensorData,
    outputData: TensorData,
  ): Promise<void> {
    const [input, output] = [bytesOf(inputData), bytesOf(outputData)]
    const rows = (rank: number) => input.subarray(rank * output.length, (rank + 1) * output.length)
    for (const { rank, link } of this.#links.peers) link.write(rows(rank))
    await this.#links.verified
    for (let start = 0; start < output.length; start += this.#chunkBytes) {
      const count = Math.min(this.#chunkBytes, output.length - start)
      await this.#receiveContributions(count)
      const own = rows(this.#rank).subarray(start, start + count)
      this.#combine(dtype, op, own, 0, output.subarray(start, start + count))
    }
  }

  async broadcast(_turn: Turn, source: number, bytes: Uint8Array): Promise<void> {
    if (this.#rank === source) for (const { link } of this.#links.peers) link.write(bytes)
    await this.#links.verified
    if (this.#rank !== source) await this.#linkTo(source).read(bytes)
  }

  /** Every rank sends a copy of everything, since the result goes where the tensors are. */
  async #reduceDirect(dtype: DType, op: ReduceOp, run: ByteRun): Promise<void> {
    const own = new Uint8Array(run.byteLength)
    run.forEachPiece(0, own.length, (piece, at) => own.set(piece, at))
    for (const { link } of this.#links.peers) link.write(own)
    await this.#links.verified
    await this.#receiveContributions(own.length)
    run.forEachPiece(0, own.length, (piece, at) => {
      this.#combine(dtype, op, own.subarray(at, at + piece.length), at, piece)
    })
  }

  /** Two ranks swap chunks. A chunk is overwritten once it has been sent. */
  async #reduceWithOne(dtype: DType, op: ReduceOp, run: ByteRun): Promise<void> {
    const link = this.#linkTo(1 - this.#rank)
    const chunks = Math.ceil(run.byteLength / this.#chunkBytes)
    const chunk = (index: number): Stripe => {
      const start = index * this.#chunkBytes
      return { start, count: Math.min(this.#chunkBytes, run.byteLength - start) }
    }
    const marks: number[] = []
    const give = (index: number) => marks.push(this.#write(link, run, chunk(index)))
    for (let index = 0; index < Math.min(WINDOW, chunks); index++) give(index)
    await this.#links.verified
    for (let index = 0; index < chunks; index++) {
      const { start, count } = chunk(index)
      await this.#receiveContributions(count)
      await link.sent(marks[index])
      run.forEachPiece(start, count, (piece, at) => this.#combine(dtype, op, piece, at, piece))
      if (index + WINDOW < chunks) give(index + WINDOW)
    }
  }

  /**
   * Every rank reduces one stripe of each chunk and sends it to all. A stripe of another rank comes back reduced when that
   * rank has received what this one had there, so it can be overwritten.
   *
   * On every connection go the contributions to chunks 0 and 1, the reduced stripe of 0, the contribution to 2, the
   * reduced stripe of 1, and so on; they are read in the same order.
   */
  async #reduceStriped(dtype: DType, op: ReduceOp, run: ByteRun): Promise<void> {
    const { peers } = this.#links
    const room = Math.floor(this.#chunkBytes / this.#worldSize / CACHE_LINE) * CACHE_LINE
    const chunkBytes = room * this.#worldSize
    const chunks = Math.ceil(run.byteLength / chunkBytes)
    const stripe = (index: number, rank: number) => {
      const start = index * chunkBytes
      return stripeOf(start, Math.min(chunkBytes, run.byteLength - start), this.#worldSize, rank)
    }
    const give = (index: number) => {
      for (const { rank, link } of peers) this.#write(link, run, stripe(index, rank))
    }
    const take = (index: number) => {
      return Promise.all(peers.map(({ rank, link }) => this.#read(link, run, stripe(index, rank))))
    }
    for (let index = 0; index < Math.min(WINDOW, chunks); index++) give(index)
    await this.#links.verified
    for (let index = 0; index < chunks; index++) {
      const own = stripe(index, this.#rank)
      await this.#receiveContributions(own.count)
      run.forEachPiece(own.start, own.count, (piece, at) => this.#combine(dtype, op, piece, at, piece))
      for (const { link } of peers) this.#write(link, run, own)
      if (index + WINDOW < chunks) give(index + WINDOW)
      if (index > 0) await take(index - 1)
    }
    await take(chunks - 1)
  }

  /** @returns number of the last write */
  #write(link: DataLink, run: ByteRun, { start, count }: Stripe): number {
    let mark = 0
    run.forEachPiece(start, count, (piece) => {
      mark = link.write(piece)
    })
    return mark
  }

  async #read(link: DataLink, run: ByteRun, { start, count }: Stripe): Promise<void> {
    const reads: Promise<void>[] = []
    run.forEachPiece(start, count, (piece) => reads.push(link.read(piece)))
    await Promise.all(reads)
  }

  /** Receives as many bytes of every other rank. */
  async #receiveContributions(count: number): Promise<void> {
    await Promise.all(this.#links.peers.map(({ rank, link }) => link.read(this.#buffer(rank, count))))
  }

  /** Reduces what this rank has with what has been received of the others, from offset `at` on. */
  #combine(dtype: DType, op: ReduceOp, own: Uint8Array, at: number, target: Uint8Array): void {
    const sources = Array.from({ length: this.#worldSize }, (_, rank) => {
      return rank === this.#rank ? own : this.#buffer(rank, at + own.length).subarray(at)
    })
    reduceBytes(this.#reduce, dtype, op, sources, target)
  }

  /** The first bytes of what is received of a rank; grows to the largest chunk. */
  #buffer(rank: number, count: number): Uint8Array {
    const buffer = this.#received[rank]
    if (buffer !== undefined && buffer.length >= count) return buffer.subarray(0, count)
    const larger = new Uint8Array(count)
    this.#received[rank] = larger
    return larger
  }

  #linkTo(rank: number): DataLink {
    const peer = this.#links.peers.find((other) => other.rank === rank)
    if (peer === undefined) throw new RangeError(`no connection to rank ${rank}`)
    return peer.link
  }
}

/** Where the stripe of a rank lies in a chunk. */
function stripeOf(start: number, bytes: number, worldSize: number, rank: number): Stripe {
  const stripeBytes = Math.ceil(Math.ceil(bytes / CACHE_LINE) / worldSize) * CACHE_LINE
  const from = Math.min(stripeBytes * rank, bytes)
  return { start: start + from, count: Math.min(stripeBytes * (rank + 1), bytes) - from }
}

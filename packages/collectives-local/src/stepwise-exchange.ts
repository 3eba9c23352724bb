import type { DType, ReduceOp, TensorData } from '@rankwise/core'
import type { Arena, Half } from './arena.ts'
import { ByteRun } from './byte-run.ts'
import { type Cursor, SLOT_HALF } from './cursor.ts'
import type { SharedExchange, SharedRange } from './exchange.ts'
import type { Reduce } from './kernel.ts'
import type { Lockstep } from './lockstep.ts'
import { bytesOf, reduceBytes } from './reduce-bytes.ts'
import type { Turn } from './turn.ts'

/** Stripes start at cache lines, so that no two ranks write to one. */
const CACHE_LINE = 64

/**
 * While a rank has at most this much to read of the others, each reduces everything by itself: one meeting fewer, and
 * with two ranks no more to read than in stripes. So two ranks always do. Measured with 2 ranks, native, the best of
 * many calls: 8 KiB take 2.7 us instead of 3.1, 32 KiB 5.6 instead of 8.0, 128 KiB 8 instead of 15, 1 MiB 122 either way,
 * 16 MiB 2.7 ms instead of 4.2.
 */
const DIRECT_BYTES = 2 ** 19

/**
 * A chunk that is small next to the second-level cache is reduced from there, and a few chunks are enough to keep it
 * busy; meetings that are not needed are slow where other processes want the cores. Measured as above: 1 MiB takes 88 us
 * in chunks of 256 KiB, 105 in 512 KiB, 112 in one.
 */
const DIRECT_CHUNK = 2 ** 18
const DIRECT_CHUNKS = 16

/** Bytes in shared memory that are reduced before the event loop is looked after. */
const IN_PLACE_BLOCK = 2 ** 20

/**
 * The protocol in TypeScript, for kernels that only reduce. Tensors pass through the slots of the arena in chunks
 * (`Arena.slot`). The native kernel follows the same protocol (native/group.c): whoever changes one changes both.
 */
export class StepwiseExchange implements SharedExchange {
  readonly #arena: Arena
  readonly #lockstep: Lockstep
  readonly #cursor: Cursor
  readonly #rank: number
  readonly #reduce: Reduce

  constructor(arena: Arena, lockstep: Lockstep, cursor: Cursor, rank: number, reduce: Reduce) {
    this.#arena = arena
    this.#lockstep = lockstep
    this.#cursor = cursor
    this.#rank = rank
    this.#reduce = reduce
  }

  barrier(turn: Turn): Promise<void> {
    return this.#lockstep.meet(turn)
  }

  async allReduce(turn: Turn, dtype: DType, op: ReduceOp, arrays: readonly TensorData[]): Promise<void> {
    const run = new ByteRun(arrays.map(bytesOf))
    const { slotBytes, worldSize } = this.#arena
    const limit = Math.min(Math.floor(DIRECT_BYTES / (worldSize - 1)), slotBytes)
    if (worldSize === 2 || run.byteLength <= limit) await this.#reduceDirect(turn, dtype, op, run)
    else await this.#reduceStriped(turn, dtype, op, run)
  }

  async allReduceInPlace(turn: Turn, dtype: DType, op: ReduceOp, range: SharedRange): Promise<void> {
    const { worldSize } = this.#arena
    const stride = range.bytes.byteLength / worldSize
    const lines = Math.ceil(range.byteLength / CACHE_LINE)
    const start = Math.floor((lines * this.#rank) / worldSize) * CACHE_LINE
    const end = Math.min(Math.floor((lines * (this.#rank + 1)) / worldSize) * CACHE_LINE, range.byteLength)
    await this.#lockstep.meet(turn)
    for (let at = start; at < end; at += IN_PLACE_BLOCK) {
      const bytes = Math.min(IN_PLACE_BLOCK, end - at)
      const [first, ...others] = Array.from({ length: worldSize }, (_, rank) => {
        const from = rank * stride + range.offset + at
        return range.bytes.subarray(from, from + bytes)
      }) as [Uint8Array, ...Uint8Array[]]
      this.#combine(dtype, op, [first, ...others], first)
      for (const other of others) other.set(first)
      await this.#lockstep.release()
    }
    await this.#lockstep.meet(turn)
  }

  async allGather(turn: Turn, input: Uint8Array, output: Uint8Array): Promise<void> {
    const { slotBytes, worldSize } = this.#arena
    await this.#inChunks(turn, input.byteLength, slotBytes, {
      give: (chunk, start, count) => this.#slot(chunk, this.#rank, 0, count).set(input.subarray(start, start + count)),
      take: (chunk, start, count) => {
        for (let rank = 0; rank < worldSize; rank++) {
          const own = rank === this.#rank
          const source = own ? input.subarray(start, start + count) : this.#slot(chunk, rank, 0, count)
          output.set(source, rank * input.byteLength + start)
        }
      },
    })
  }

  /** A chunk holds the same piece of the rows of every rank, one after the other. */
  async reduceScatter(
    turn: Turn,
    dtype: DType,
    op: ReduceOp,
    inputData: TensorData,
    outputData: TensorData,
  ): Promise<void> {
    const { worldSize } = this.#arena
    const [input, output] = [bytesOf(inputData), bytesOf(outputData)]
    const room = this.#stripeRoom
    const rows = (rank: number, start: number, count: number) =>
      input.subarray(rank * output.byteLength + start, rank * output.byteLength + start + count)
    await this.#inChunks(turn, output.byteLength, room, {
      give: (chunk, start, count) => {
        for (let rank = 0; rank < worldSize; rank++) {
          if (rank !== this.#rank) this.#slot(chunk, this.#rank, rank * room, count).set(rows(rank, start, count))
        }
      },
      take: (chunk, start, count) => {
        const sources = this.#contributions(chunk, this.#rank * room, rows(this.#rank, start, count))
        this.#combine(dtype, op, sources, output.subarray(start, start + count))
      },
    })
  }

  async broadcast(turn: Turn, source: number, bytes: Uint8Array): Promise<void> {
    await this.#inChunks(turn, bytes.byteLength, this.#arena.slotBytes, {
      give: (chunk, start, count) => {
        if (this.#rank === source) this.#slot(chunk, source, 0, count).set(bytes.subarray(start, start + count))
      },
      take: (chunk, start, count) => {
        if (this.#rank !== source) bytes.set(this.#slot(chunk, source, 0, count), start)
      },
    })
  }

  /** Every rank gives all ranks everything, and each reduces all of it. */
  async #reduceDirect(turn: Turn, dtype: DType, op: ReduceOp, run: ByteRun): Promise<void> {
    await this.#inChunks(turn, run.byteLength, this.#directChunkBytes(run.byteLength), {
      give: (chunk, start, count) =>
        run.forEachPiece(start, count, (piece, at) => this.#slot(chunk, this.#rank, at, piece.length).set(piece)),
      take: (chunk, start, count) =>
        run.forEachPiece(start, count, (piece, at) =>
          this.#combine(dtype, op, this.#contributions(chunk, at, piece), piece),
        ),
    })
  }

  /**
   * Every rank reduces one stripe of each chunk. Three chunks are on their way at a time, so that one meeting per chunk
   * is enough.
   */
  async #reduceStriped(turn: Turn, dtype: DType, op: ReduceOp, run: ByteRun): Promise<void> {
    const room = this.#stripeRoom
    const chunkBytes = room * this.#arena.worldSize
    const chunks = Math.ceil(run.byteLength / chunkBytes)
    const chunkAt = (index: number): Chunk => {
      const start = index * chunkBytes
      const bytes = Math.min(chunkBytes, run.byteLength - start)
      const lines = Math.ceil(Math.ceil(bytes / CACHE_LINE) / this.#arena.worldSize)
      return { index, start, bytes, stripeBytes: lines * CACHE_LINE, room }
    }
    for (let step = 0; step <= chunks + 1; step++) {
      if (step >= 2) this.#takeStripes(run, chunkAt(step - 2))
      if (step >= 1 && step <= chunks) this.#reduceStripe(dtype, op, run, chunkAt(step - 1))
      if (step < chunks) this.#giveStripes(run, chunkAt(step))
      if (step <= chunks) await this.#lockstep.meet(turn)
    }
    this.#finish(chunks)
  }

  #giveStripes(run: ByteRun, chunk: Chunk): void {
    this.#forEachOther((rank) => {
      const { start, count } = stripeOf(chunk, rank)
      run.forEachPiece(start, count, (piece, at) => {
        this.#slot(chunk.index, this.#rank, rank * chunk.room + at, piece.length).set(piece)
      })
    })
  }

  #reduceStripe(dtype: DType, op: ReduceOp, run: ByteRun, chunk: Chunk): void {
    const { start, count } = stripeOf(chunk, this.#rank)
    const offset = this.#rank * chunk.room
    run.forEachPiece(start, count, (piece, at) => {
      this.#combine(dtype, op, this.#contributions(chunk.index, offset + at, piece), piece)
      this.#slot(chunk.index, this.#rank, offset + at, piece.length).set(piece)
    })
  }

  #takeStripes(run: ByteRun, chunk: Chunk): void {
    this.#forEachOther((rank) => {
      const { start, count } = stripeOf(chunk, rank)
      run.forEachPiece(start, count, (piece, at) => {
        piece.set(this.#slot(chunk.index, rank, rank * chunk.room + at, piece.length))
      })
    })
  }

  /** Gives a chunk, meets the others, and takes that chunk; at least one meeting, even without a byte. */
  async #inChunks(turn: Turn, total: number, chunkBytes: number, { give, take }: ChunkSteps): Promise<void> {
    const chunks = Math.ceil(total / chunkBytes)
    for (let chunk = 0; chunk < Math.max(chunks, 1); chunk++) {
      const start = chunk * chunkBytes
      const count = Math.min(chunkBytes, total - start)
      if (count > 0) give(chunk, start, count)
      await this.#lockstep.meet(turn)
      if (count > 0) take(chunk, start, count)
    }
    this.#finish(chunks)
  }

  #finish(chunks: number): void {
    this.#cursor[SLOT_HALF] = this.#half(chunks)
  }

  #half(chunk: number): Half {
    return (((this.#cursor[SLOT_HALF] as number) + chunk) & 1) as Half
  }

  /** Part of the slot of `rank` for a chunk of this operation. */
  #slot(chunk: number, rank: number, offset: number, count: number): Uint8Array {
    const start = this.#arena.slot(this.#half(chunk), rank) + offset
    return this.#arena.bytes.subarray(start, start + count)
  }

  /** What each rank contributes, at `offset` of its slot; this rank's own is where the user has it. */
  #contributions(chunk: number, offset: number, own: Uint8Array): Uint8Array[] {
    return Array.from({ length: this.#arena.worldSize }, (_, rank) =>
      rank === this.#rank ? own : this.#slot(chunk, rank, offset, own.length),
    )
  }

  #combine(dtype: DType, op: ReduceOp, sources: readonly Uint8Array[], target: Uint8Array): void {
    reduceBytes(this.#reduce, dtype, op, sources, target)
  }

  #directChunkBytes(total: number): number {
    const share = Math.ceil(total / (DIRECT_CHUNKS * CACHE_LINE)) * CACHE_LINE
    return Math.min(Math.max(share, DIRECT_CHUNK), this.#arena.slotBytes)
  }

  /** Bytes of a slot that belong to one stripe. */
  get #stripeRoom(): number {
    return Math.floor(this.#arena.slotBytes / this.#arena.worldSize / CACHE_LINE) * CACHE_LINE
  }

  #forEachOther(visit: (rank: number) => void): void {
    for (let rank = 0; rank < this.#arena.worldSize; rank++) if (rank !== this.#rank) visit(rank)
  }
}

/**
 * A chunk and its stripes. A stripe lies at the same place of a slot in every chunk, so that a rank may write stripes
 * of a chunk while others still read another stripe of the chunk before the last.
 */
interface Chunk {
  readonly index: number
  readonly start: number
  readonly bytes: number
  readonly stripeBytes: number
  readonly room: number
}

interface ChunkSteps {
  give(chunk: number, start: number, count: number): void
  take(chunk: number, start: number, count: number): void
}

/** Where the stripe of a rank lies in the run. */
function stripeOf({ start, bytes, stripeBytes }: Chunk, rank: number): { start: number; count: number } {
  const from = Math.min(stripeBytes * rank, bytes)
  const to = Math.min(stripeBytes * (rank + 1), bytes)
  return { start: start + from, count: to - from }
}

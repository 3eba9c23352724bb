import {
  allocate,
  bytesOf,
  type CollectiveOptions,
  type Collectives,
  type DType,
  itemSize,
  type PackedTensors,
  packByDtype,
  type ReduceOp,
  sizeOf,
  Tensor,
  viewAs,
} from '@rankwise/core'
import {
  describeEncoded,
  encodeOperation,
  type Failure,
  OPERATION_WORDS,
  type Operation,
  requireValid,
} from '@rankwise/core/collectives'
import { CACHE_LINE, type ChunkMemory, HEADER_BYTES } from './chunk-memory.ts'
import type { Chunk, Leaders, Segments } from './leaders.ts'
import type { Machines } from './machines.ts'
import type { Region } from './mailbox.ts'
import type { MpiGroupState } from './mpi-group-state.ts'
import type { MpiSession } from './session.ts'

/** What a group consists of. */
export interface MpiGroup {
  readonly rank: number
  readonly machines: Machines
  readonly state: MpiGroupState
  /** The ranks of this machine, in the order of their ranks. */
  readonly local: Collectives
  /** On the leader of a machine. */
  readonly leaders: Leaders | undefined
  readonly session: MpiSession | undefined
  readonly memory: ChunkMemory
}

/**
 * Collectives of ranks on several machines. Each machine reduces over shared memory; its leader, the lowest rank, meets
 * the other leaders over MPI and hands the result to its machine. Sums are formed machine by machine in rank order, and
 * then over the machines: the same bits on all ranks, though not those of one sum over all ranks.
 */
export class MpiCollectives implements Collectives {
  readonly name = 'mpi'
  readonly rank: number
  readonly worldSize: number
  readonly #machines: Machines
  readonly #state: MpiGroupState
  readonly #local: Collectives
  readonly #leaders: Leaders | undefined
  readonly #session: MpiSession | undefined
  readonly #chunkBytes: number
  readonly #chunks: readonly [Chunk, Chunk]
  readonly #headers: Region
  #sequence = 0
  #completed = 0
  #last: Promise<unknown> = Promise.resolve()
  /** What the operation that runs has begun; the memory of the group is not freed before all of it has ended. */
  #begun: Promise<unknown>[] = []
  #destroyed: Promise<void> | undefined

  constructor({ rank, machines, state, local, leaders, session, memory }: MpiGroup) {
    this.rank = rank
    this.worldSize = machines.worldSize
    this.#machines = machines
    this.#state = state
    this.#local = local
    this.#leaders = leaders
    this.#session = session
    this.#chunkBytes = memory.chunkBytes
    this.#chunks = memory.chunks
    this.#headers = memory.headers
    state.onFailure = ({ what }) => local.abort(new Error(what))
  }

  async allReduce(
    tensors: readonly Tensor[],
    { op = 'sum', signal }: CollectiveOptions & { readonly op?: ReduceOp } = {},
  ): Promise<void> {
    await this.#run({ kind: 'allReduce', reduceOp: op, tensors }, signal, async (verified) => {
      for (const packed of packByDtype(tensors)) await this.#reducePacked(packed, op, verified)
    })
  }

  async allGather(tensor: Tensor, { signal }: CollectiveOptions = {}): Promise<Tensor> {
    return this.#run({ kind: 'allGather', tensors: [tensor] }, signal, () => this.#gather(tensor))
  }

  async reduceScatter(
    tensor: Tensor,
    { op = 'sum', signal }: CollectiveOptions & { readonly op?: ReduceOp } = {},
  ): Promise<Tensor> {
    return this.#run({ kind: 'reduceScatter', reduceOp: op, tensors: [tensor] }, signal, () =>
      this.#reduceRows(tensor, op),
    )
  }

  async broadcast(
    tensor: Tensor,
    { source = 0, signal }: CollectiveOptions & { readonly source?: number } = {},
  ): Promise<void> {
    await this.#run({ kind: 'broadcast', source, tensors: [tensor] }, signal, (verified) =>
      this.#spread(bytesOf(tensor), source, verified),
    )
  }

  async barrier({ signal }: CollectiveOptions = {}): Promise<void> {
    await this.#run({ kind: 'barrier', tensors: [] }, signal, async (verified) => {
      await verified
      await this.#local.barrier()
    })
  }

  abort(reason: Error): void {
    const what = `rank ${this.rank} aborted the group: ${reason.message}`
    this.#state.fail({ code: 'ABORTED', what, ranks: [this.rank], cause: reason })
  }

  destroy(): Promise<void> {
    this.#destroyed ??= this.#leave()
    return this.#destroyed
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.destroy()
  }

  async #leave(): Promise<void> {
    this.#state.leave(this.#completed, LEFT)
    try {
      await this.#local.destroy()
      await this.#last
      await this.#session?.leave(this.#state, this.#state.failure === LEFT)
    } finally {
      await this.#state.close()
    }
  }

  /**
   * Takes a number even for a call that is refused: a rank that goes on after it must not be taken for in step.
   *
   * @param body gets a promise that resolves when all ranks are known to run the same operation
   */
  #run<T>(
    call: Omit<Operation, 'sequence'>,
    signal: AbortSignal | undefined,
    body: (verified: Promise<void>) => Promise<T>,
  ): Promise<T> {
    this.#sequence += 1
    const operation = { ...call, sequence: this.#sequence }
    requireValid(operation, this.worldSize)
    const result = this.#last.then(() =>
      this.#state.run(operation, signal, async () => {
        await this.#compareOnMachine(operation)
        const verified = this.#begin(this.#compareMachines())
        const [value] = await Promise.all([this.#begin(body(verified)), verified])
        this.#completed = operation.sequence
        return value
      }),
    )
    // When an operation fails the group has ended, and with it all that the operation has begun, a little later.
    this.#last = result.catch(() => {}).then(() => Promise.allSettled(this.#begun.splice(0)))
    return result
  }

  #begin<T>(work: Promise<T>): Promise<T> {
    this.#begun.push(work.catch(() => {}))
    return work
  }

  async #compareOnMachine(operation: Operation): Promise<void> {
    const words = new Int32Array(OPERATION_WORDS)
    encodeOperation(operation, words)
    const { data } = await this.#local.allGather(new Tensor('int32', [1, OPERATION_WORDS], words))
    this.#requireEqual(data as Int32Array, this.#machines.ownRanks)
    const { start } = this.#headerSegments[this.#machines.own] as Segments[number]
    this.#headers.bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), start)
  }

  async #compareMachines(): Promise<void> {
    if (this.#leaders === undefined) return
    await this.#leaders.exchangeHeaders(this.#headers, this.#headerSegments)
    const words = viewAs('int32', this.#headers.bytes) as Int32Array
    this.#requireEqual(words.subarray(0, this.worldSize * OPERATION_WORDS), this.#machines.ranks.flat())
  }

  get #headerSegments(): Segments {
    return this.#segments(HEADER_BYTES)
  }

  #requireEqual(headers: Int32Array, ranks: readonly number[]): void {
    const operations = ranks.map((rank, index) => {
      return { rank, words: headers.subarray(index * OPERATION_WORDS, (index + 1) * OPERATION_WORDS) }
    })
    const [first] = operations
    if (operations.every(({ words }) => words.every((word, i) => word === first?.words[i]))) return
    const inRankOrder = operations.toSorted((a, b) => a.rank - b.rank)
    this.#state.fail({
      code: 'COLLECTIVE_MISMATCH',
      what: 'the ranks are at different operations',
      ranks: [],
      actual: Object.fromEntries(inRankOrder.map(({ rank, words }) => [`rank ${rank} at`, describeEncoded(words)])),
      rule: 'every rank calls the same operations in the same order, with the same shapes and dtypes',
    })
    this.#state.requireRunning()
  }

  /** While one chunk is between the machines, the next one is reduced on each of them. */
  async #reducePacked(packed: PackedTensors, op: ReduceOp, verified: Promise<void>): Promise<void> {
    const { dtype, byteLength } = packed
    await this.#pipeline(byteLength, {
      meet: async (chunk, start, bytes) => {
        packed.copyTo(chunk.data.bytes, 0, start, bytes)
        await this.#local.allReduce([tensorOf(chunk, dtype, bytes)], { op })
      },
      exchange: async (chunk, bytes) => this.#leaders?.allReduce(chunk, dtype, op, bytes),
      spread: async (chunk, start, bytes) => {
        await verified
        await this.#local.broadcast(tensorOf(chunk, dtype, bytes))
        packed.copyFrom(chunk.data.bytes, 0, start, bytes)
      },
    })
  }

  async #pipeline(byteLength: number, { meet, exchange, spread }: Stages): Promise<void> {
    let previous: (() => Promise<void>) | undefined
    for (let start = 0, turn = 0; start < byteLength; start += this.#chunkBytes, turn++) {
      const bytes = Math.min(this.#chunkBytes, byteLength - start)
      const chunk = this.#chunks[turn % 2] as Chunk
      await meet(chunk, start, bytes)
      const exchanged = this.#begin(exchange(chunk, bytes))
      await previous?.()
      previous = async () => {
        await exchanged
        await spread(chunk, start, bytes)
      }
    }
    await previous?.()
  }

  /** A chunk holds the same part of the tensors of all ranks, machine by machine. */
  async #gather(tensor: Tensor): Promise<Tensor> {
    const input = bytesOf(tensor)
    const output = allocateRows(tensor, (tensor.shape[0] as number) * this.worldSize)
    const gathered = bytesOf(output)
    const [chunk] = this.#chunks
    const { bytes } = chunk.data
    for (const { start, count } of this.#parts(input.length, 1)) {
      const segments = this.#segments(count)
      const part = new Tensor('uint8', [count], input.subarray(start, start + count))
      const own = await this.#local.allGather(part)
      bytes.set(bytesOf(own), segments[this.#machines.own]?.start)
      await this.#leaders?.allGather(chunk, segments)
      await this.#local.broadcast(tensorOf(chunk, 'uint8', count * this.worldSize))
      for (const [index, rank] of this.#machines.ranks.flat().entries()) {
        gathered.set(bytes.subarray(index * count, (index + 1) * count), rank * input.length + start)
      }
    }
    return output
  }

  /** A chunk holds the same part of the rows of every rank, machine by machine. */
  async #reduceRows(tensor: Tensor, op: ReduceOp): Promise<Tensor> {
    const { dtype } = tensor
    const input = bytesOf(tensor)
    const output = allocateRows(tensor, (tensor.shape[0] as number) / this.worldSize)
    const [chunk] = this.#chunks
    const { bytes } = chunk.data
    const ranks = this.#machines.ranks.flat()
    for (const { start, count } of this.#parts(output.byteLength, itemSize(dtype))) {
      for (const [index, rank] of ranks.entries()) {
        const from = rank * output.byteLength + start
        bytes.set(input.subarray(from, from + count), index * count)
      }
      await this.#local.allReduce([tensorOf(chunk, dtype, count * this.worldSize)], { op })
      const segments = this.#segments(count)
      await this.#leaders?.reduceScatter(chunk, dtype, op, segments)
      const own = segments[this.#machines.own] as Segments[number]
      await this.#local.broadcast(new Tensor('uint8', [own.bytes], bytes.subarray(own.start, own.start + own.bytes)))
      const from = ranks.indexOf(this.rank) * count
      bytesOf(output).set(bytes.subarray(from, from + count), start)
    }
    return output
  }

  async #spread(data: Uint8Array, source: number, verified: Promise<void>): Promise<void> {
    const machine = this.#machines.machineOf(source)
    const onSourceMachine = machine === this.#machines.own
    const localSource = onSourceMachine ? this.#machines.ownRanks.indexOf(source) : 0
    const hand = async (chunk: Chunk, bytes: number, from: number) =>
      this.#local.broadcast(tensorOf(chunk, 'uint8', bytes), { source: from })
    await this.#pipeline(data.length, {
      meet: async (chunk, start, bytes) => {
        if (!onSourceMachine) return
        chunk.data.bytes.set(data.subarray(start, start + bytes))
        await hand(chunk, bytes, localSource)
      },
      exchange: async (chunk, bytes) => this.#leaders?.broadcast(chunk, bytes, machine),
      spread: async (chunk, start, bytes) => {
        await verified
        if (!onSourceMachine) await hand(chunk, bytes, 0)
        data.set(chunk.data.bytes.subarray(0, bytes), start)
      },
    })
  }

  /** Where the blocks of the machines lie when every rank has `bytes` bytes. */
  #segments(bytes: number): Segments {
    let start = 0
    return this.#machines.ranks.map(({ length }) => {
      const segment = { start, bytes: length * bytes }
      start += segment.bytes
      return segment
    })
  }

  /** Parts of `byteLength` bytes of which a chunk holds one for every rank. */
  *#parts(byteLength: number, itemBytes: number): Generator<{ start: number; count: number }> {
    const most = Math.max(Math.floor(this.#chunkBytes / this.worldSize / CACHE_LINE) * CACHE_LINE, itemBytes)
    for (let start = 0; start < byteLength; start += most) yield { start, count: Math.min(most, byteLength - start) }
  }
}

/** What happens to a chunk: on its machine, between the leaders, and on its machine again. */
interface Stages {
  meet(chunk: Chunk, start: number, bytes: number): Promise<void>
  exchange(chunk: Chunk, bytes: number): Promise<void>
  spread(chunk: Chunk, start: number, bytes: number): Promise<void>
}

/** What operations of a rank fail with after it has left. */
export const LEFT: Failure = {
  code: 'COLLECTIVES_DESTROYED',
  what: 'this rank has left the group',
  ranks: [],
  rule: 'no operation after destroy',
}

function tensorOf({ data }: Chunk, dtype: DType, bytes: number): Tensor {
  const view = viewAs(dtype, data.bytes.subarray(0, bytes))
  return new Tensor(dtype, [bytes / itemSize(dtype)], view)
}

function allocateRows({ dtype, shape }: Tensor, rows: number): Tensor {
  const outputShape = [rows, ...shape.slice(1)]
  return new Tensor(dtype, outputShape, allocate(dtype, sizeOf(outputShape)))
}

import {
  allocate,
  type CollectiveOptions,
  type Collectives,
  itemSize,
  type ReduceOp,
  sizeOf,
  Tensor,
} from '@rankwise/core'
import type { Arena, Half } from './arena.ts'
import type { Lockstep, Turn } from './lockstep.ts'
import { type Operation, requireValid } from './operation.ts'
import { bytesOf, type PackedTensors, packByDtype } from './packed-tensors.ts'
import { reduce } from './reduce.ts'

/** Stripes start at cache lines, so that no two ranks write to one. */
export const CACHE_LINE = 64

/**
 * Collectives over memory that the ranks of one machine share. Tensors pass through the slots of the arena in chunks;
 * a chunk uses one half of the slots and the next chunk the other, so a rank may write a chunk while another still
 * reads the one before. Operations that are called without waiting run one after the other.
 */
export class LocalCollectives implements Collectives {
  readonly name = 'local'
  readonly rank: number
  readonly worldSize: number
  readonly #arena: Arena
  readonly #lockstep: Lockstep
  #sequence = 0
  #half: Half = 0
  #last: Promise<unknown> = Promise.resolve()
  #destroyed: Promise<void> | undefined

  constructor(arena: Arena, lockstep: Lockstep, rank: number) {
    this.rank = rank
    this.worldSize = arena.worldSize
    this.#arena = arena
    this.#lockstep = lockstep
  }

  async allReduce(
    tensors: readonly Tensor[],
    { op = 'sum', signal }: CollectiveOptions & { readonly op?: ReduceOp } = {},
  ): Promise<void> {
    await this.#run({ kind: 'allReduce', reduceOp: op, tensors }, signal, async (turn) => {
      for (const packed of packByDtype(tensors)) await this.#reducePacked(packed, op, turn)
    })
  }

  async allGather(tensor: Tensor, { signal }: CollectiveOptions = {}): Promise<Tensor> {
    return this.#run({ kind: 'allGather', tensors: [tensor] }, signal, (turn) => this.#gather(tensor, turn))
  }

  async reduceScatter(
    tensor: Tensor,
    { op = 'sum', signal }: CollectiveOptions & { readonly op?: ReduceOp } = {},
  ): Promise<Tensor> {
    return this.#run({ kind: 'reduceScatter', reduceOp: op, tensors: [tensor] }, signal, (turn) =>
      this.#reduceRows(tensor, op, turn),
    )
  }

  async broadcast(
    tensor: Tensor,
    { source = 0, signal }: CollectiveOptions & { readonly source?: number } = {},
  ): Promise<void> {
    await this.#run({ kind: 'broadcast', source, tensors: [tensor] }, signal, (turn) =>
      this.#spread(bytesOf(tensor), source, turn),
    )
  }

  async barrier({ signal }: CollectiveOptions = {}): Promise<void> {
    await this.#run({ kind: 'barrier', tensors: [] }, signal, (turn) => this.#lockstep.meet(turn))
  }

  abort(reason: Error): void {
    if (this.#destroyed !== undefined) return
    const what = `rank ${this.rank} aborted the group: ${reason.message}`
    this.#lockstep.fail({ code: 'ABORTED', what, ranks: [this.rank], cause: reason })
  }

  destroy(): Promise<void> {
    this.#destroyed ??= this.#leave()
    return this.#destroyed
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.destroy()
  }

  async #leave(): Promise<void> {
    this.#lockstep.leave()
    await this.#last
    this.#arena.destroy()
  }

  /** Takes a number even for a call that is refused: a rank that goes on after it must not be taken for in step. */
  #run<T>(
    call: Omit<Operation, 'sequence'>,
    signal: AbortSignal | undefined,
    body: (turn: Turn) => Promise<T>,
  ): Promise<T> {
    this.#sequence += 1
    const operation = { ...call, sequence: this.#sequence }
    requireValid(operation, this.worldSize)
    const result = this.#last.then(() => this.#lockstep.run(operation, signal, body))
    this.#last = result.catch(() => {})
    return result
  }

  async #reducePacked(packed: PackedTensors, op: ReduceOp, turn: Turn): Promise<void> {
    const { slotBytes, bytes } = this.#arena
    for (let start = 0; start < packed.byteLength; start += slotBytes) {
      const count = Math.min(slotBytes, packed.byteLength - start)
      const half = this.#nextHalf()
      const firstSlot = this.#arena.slot(half, 0)
      packed.copyTo(bytes, this.#arena.slot(half, this.rank), start, count)
      await this.#lockstep.meet(turn)
      this.#reduceStripe(packed, op, firstSlot, count)
      await this.#lockstep.meet(turn)
      packed.copyFrom(bytes, firstSlot, start, count)
    }
  }

  /** Reduces this rank's share of a chunk into the slot of rank 0, where only this rank reads and writes it. */
  #reduceStripe({ dtype }: PackedTensors, op: ReduceOp, firstSlot: number, count: number): void {
    const lines = Math.ceil(count / CACHE_LINE)
    const from = Math.floor((lines * this.rank) / this.worldSize) * CACHE_LINE
    const to = Math.min(Math.floor((lines * (this.rank + 1)) / this.worldSize) * CACHE_LINE, count)
    const itemBytes = itemSize(dtype)
    const view = this.#arena.view(dtype)
    const first = (firstSlot + from) / itemBytes
    reduce(dtype, op, {
      source: view,
      first,
      stride: this.#arena.slotBytes / itemBytes,
      ranks: this.worldSize,
      target: view,
      targetStart: first,
      count: (to - from) / itemBytes,
    })
  }

  async #gather(tensor: Tensor, turn: Turn): Promise<Tensor> {
    const { slotBytes, bytes } = this.#arena
    const input = bytesOf(tensor)
    const output = this.#allocateRows(tensor, (tensor.shape[0] as number) * this.worldSize)
    const gathered = bytesOf(output)
    for (let start = 0; start < input.length; start += slotBytes) {
      const count = Math.min(slotBytes, input.length - start)
      const half = this.#nextHalf()
      bytes.set(input.subarray(start, start + count), this.#arena.slot(half, this.rank))
      await this.#lockstep.meet(turn)
      for (let rank = 0; rank < this.worldSize; rank++) {
        const slot = this.#arena.slot(half, rank)
        gathered.set(bytes.subarray(slot, slot + count), rank * input.length + start)
      }
    }
    return output
  }

  /** A chunk holds the same part of the rows of every rank, one after the other. */
  async #reduceRows(tensor: Tensor, op: ReduceOp, turn: Turn): Promise<Tensor> {
    const { slotBytes, bytes } = this.#arena
    const { dtype } = tensor
    const input = bytesOf(tensor)
    const output = this.#allocateRows(tensor, (tensor.shape[0] as number) / this.worldSize)
    const itemBytes = itemSize(dtype)
    const partBytes = Math.floor(slotBytes / this.worldSize / CACHE_LINE) * CACHE_LINE
    for (let start = 0; start < output.byteLength; start += partBytes) {
      const count = Math.min(partBytes, output.byteLength - start)
      const half = this.#nextHalf()
      for (let rank = 0; rank < this.worldSize; rank++) {
        const from = rank * output.byteLength + start
        bytes.set(input.subarray(from, from + count), this.#arena.slot(half, this.rank) + rank * partBytes)
      }
      await this.#lockstep.meet(turn)
      reduce(dtype, op, {
        source: this.#arena.view(dtype),
        first: (this.#arena.slot(half, 0) + this.rank * partBytes) / itemBytes,
        stride: slotBytes / itemBytes,
        ranks: this.worldSize,
        target: output.data,
        targetStart: start / itemBytes,
        count: count / itemBytes,
      })
    }
    return output
  }

  async #spread(data: Uint8Array, source: number, turn: Turn): Promise<void> {
    const { slotBytes, bytes } = this.#arena
    for (let start = 0; start < data.length; start += slotBytes) {
      const count = Math.min(slotBytes, data.length - start)
      const slot = this.#arena.slot(this.#nextHalf(), source)
      if (this.rank === source) bytes.set(data.subarray(start, start + count), slot)
      await this.#lockstep.meet(turn)
      if (this.rank !== source) data.set(bytes.subarray(slot, slot + count), start)
    }
  }

  #allocateRows({ dtype, shape }: Tensor, rows: number): Tensor {
    const outputShape = [rows, ...shape.slice(1)]
    return new Tensor(dtype, outputShape, allocate(dtype, sizeOf(outputShape)))
  }

  #nextHalf(): Half {
    const half = this.#half
    this.#half = half === 0 ? 1 : 0
    return half
  }
}

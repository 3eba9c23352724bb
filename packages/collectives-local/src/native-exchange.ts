import { availableParallelism } from 'node:os'
import type { DType, ReduceOp, TensorData } from '@rankwise/core'
import type { Arena } from './arena.ts'
import type { Cursor } from './cursor.ts'
import type { Completion, SharedExchange, SharedRange } from './exchange.ts'
import type { Lockstep } from './lockstep.ts'
import { type Addon, dtypeNumber, type NativeGroup, reduceOpNumber } from './native-kernel.ts'
import type { Turn } from './turn.ts'

/** The numbers of `status_t` in native/group.h. */
const DONE = 0
const WAIT = 1
const YIELD = 2
const MISMATCH = 3

/**
 * The protocol in C: an operation is one call while no rank has to be waited for longer than a rank spins. The call
 * remembers where it stopped; it is made again, with the same arguments, to go on.
 */
export class NativeExchange implements SharedExchange {
  readonly #addon: Addon
  readonly #lockstep: Lockstep
  readonly #group: NativeGroup

  constructor(addon: Addon, arena: Arena, lockstep: Lockstep, cursor: Cursor, rank: number) {
    this.#addon = addon
    this.#lockstep = lockstep
    const { bytes, slotBytes, worldSize } = arena
    const spins = worldSize <= availableParallelism() ? 1 : 0
    this.#group = addon.open(bytes, slotBytes, worldSize, rank, spins, cursor)
  }

  barrier(turn: Turn): Completion {
    return this.#run(turn, () => this.#addon.barrier(this.#group))
  }

  allReduce(turn: Turn, dtype: DType, op: ReduceOp, arrays: readonly TensorData[]): Completion {
    const [dtypeId, opId] = [dtypeNumber(dtype), reduceOpNumber(op)]
    return this.#run(turn, () => this.#addon.allReduce(this.#group, dtypeId, opId, arrays))
  }

  allReduceInPlace(turn: Turn, dtype: DType, op: ReduceOp, { bytes, offset, byteLength }: SharedRange): Completion {
    const [dtypeId, opId] = [dtypeNumber(dtype), reduceOpNumber(op)]
    return this.#run(turn, () => this.#addon.allReduceInPlace(this.#group, dtypeId, opId, bytes, offset, byteLength))
  }

  allGather(turn: Turn, input: Uint8Array, output: Uint8Array): Completion {
    return this.#run(turn, () => this.#addon.allGather(this.#group, input, output))
  }

  reduceScatter(turn: Turn, dtype: DType, op: ReduceOp, input: TensorData, output: TensorData): Completion {
    const [dtypeId, opId] = [dtypeNumber(dtype), reduceOpNumber(op)]
    return this.#run(turn, () => this.#addon.reduceScatter(this.#group, dtypeId, opId, input, output))
  }

  broadcast(turn: Turn, source: number, bytes: Uint8Array): Completion {
    return this.#run(turn, () => this.#addon.broadcast(this.#group, source, bytes))
  }

  #run(turn: Turn, step: () => number): Completion {
    this.#lockstep.requireRunning(turn)
    const status = step()
    return status === DONE ? undefined : this.#goOn(turn, step, status)
  }

  async #goOn(turn: Turn, step: () => number, first: number): Promise<void> {
    for (let status = first; status !== DONE; status = step()) {
      if (status === WAIT) await this.#lockstep.wait(turn)
      else if (status === YIELD) await this.#lockstep.release()
      else if (status === MISMATCH) this.#lockstep.verify(turn)
      this.#lockstep.requireRunning(turn)
    }
  }
}

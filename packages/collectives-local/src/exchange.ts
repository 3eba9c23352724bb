import type { DType, ReduceOp, TensorData } from '@rankwise/core'
import type { Turn } from './turn.ts'

/** Nothing, at once if no rank had to be waited for. */
export type Completion = Promise<void> | undefined

/** Memory that holds one contribution of every rank, all of the same size, one after the other in rank order. */
export interface SharedRange {
  /** All of it. */
  readonly bytes: Uint8Array
  /** Where the tensor starts in the part of each rank, in bytes. */
  readonly offset: number
  readonly byteLength: number
}

/** How tensors get from rank to rank. What is given to a method must stay as it is until it has completed. */
export interface Exchange {
  /** Waits for all ranks. */
  barrier(turn: Turn): Completion
  /** Reduces arrays of one dtype in place, as if they were one. */
  allReduce(turn: Turn, dtype: DType, op: ReduceOp, arrays: readonly TensorData[]): Completion
  /** `output` holds `worldSize` times what `input` does. */
  allGather(turn: Turn, input: Uint8Array, output: Uint8Array): Completion
  /** `input` holds `worldSize` times what `output` does. */
  reduceScatter(turn: Turn, dtype: DType, op: ReduceOp, input: TensorData, output: TensorData): Completion
  /** Overwrites `bytes` with those of rank `source`. */
  broadcast(turn: Turn, source: number, bytes: Uint8Array): Completion
}

/**
 * The same through shared memory. The two implementations follow one protocol, so ranks of a group may mix them; every
 * method meets the other ranks at least once.
 */
export interface SharedExchange extends Exchange {
  /** Reduces what all ranks hold in shared memory, where it is. */
  allReduceInPlace(turn: Turn, dtype: DType, op: ReduceOp, range: SharedRange): Completion
}

import type { DType, RankwiseError, ReduceOp, Tensor } from '@rankwise/core'
import type { Failure, Operation, SharedPlace } from '@rankwise/core/collectives'
import type { Completion, Exchange } from './exchange.ts'
import type { Turn } from './turn.ts'

/** What carries tensors from rank to rank: shared memory, or TCP connections over the loopback. */
export type TransportName = 'shm' | 'tcp'

/** What a rank asks for. */
export type TransportChoice = TransportName | 'auto'

/** A tensor that is reduced where it is. */
export interface InPlace {
  readonly place: SharedPlace
  reduce(turn: Turn, dtype: DType, op: ReduceOp): Completion
}

/** What a rank holds of the memory that its group has allocated for tensors. */
export interface Allocations {
  /** Whether the group has never allocated anything. */
  readonly isEmpty: boolean
  /**
   * How a tensor is reduced where it is; undefined when it travels like any other.
   *
   * @throws RankwiseError `TENSOR_DISPOSED`
   */
  find(tensor: Tensor): InPlace | undefined
}

/** Memory of a tensor, and what gives it back. */
export interface TensorMemory {
  readonly bytes: Uint8Array
  readonly release: () => void
}

/** The ranks of a group, connected: who keeps them in step, and what they exchange tensors with. */
export interface Transport {
  readonly name: TransportName
  readonly worldSize: number
  readonly exchange: Exchange
  readonly allocations: Allocations
  /**
   * Runs `body` as the next operation; one at a time. Any failure ends the group: no rank can know where the others
   * stand. The result may be there at once.
   *
   * @throws RankwiseError `RANK_LOST`, `COLLECTIVE_TIMEOUT`, `COLLECTIVE_MISMATCH`, `ABORTED`, `COLLECTIVES_DESTROYED`
   */
  run<T>(operation: Operation, signal: AbortSignal | undefined, body: (turn: Turn) => Promise<T> | T): Promise<T> | T
  /** Ends the group on all ranks; only the first failure counts. */
  fail(failure: Failure): void
  /** Ends the group on this rank without an error for the others, unless they wait for it. */
  leave(): void
  /** Frees everything, after {@link leave} and after the last operation. */
  close(): Promise<void> | void
  /** Memory for one tensor on every rank: all ranks get some, or all get the same error. */
  allocate(turn: Turn, byteLength: number): Promise<TensorMemory | RankwiseError>
  /**
   * The transport of a new group of at least two ranks; undefined on ranks that are not in it.
   *
   * @param members ranks of this group, in ascending order
   */
  split(turn: Turn, members: readonly number[]): Promise<Transport | RankwiseError | undefined>
}

/** How messages tell a new group from the one that it was made from. */
export function labelOf(parent: string, members: readonly number[]): string {
  return `${parent === '' ? '' : `${parent}, `}group of ${members.length === 1 ? 'rank' : 'ranks'} ${members.join(', ')}`
}

import type { DeviceBuffer } from './device-buffer.ts'
import type { DType } from './dtype.ts'
import type { Shape, Tensor } from './tensor.ts'

/** How all-reduce and reduce-scatter join the ranks' elements. */
export type ReduceOp = 'sum' | 'max' | 'min'

/** Options of every operation. */
export interface CollectiveOptions {
  /** Aborting it fails the operation on this rank with `ABORTED` and on the others with `RANK_LOST`. */
  readonly signal?: AbortSignal | undefined
}

/** Options of operations on memory of a GPU. */
export interface DeviceOptions extends CollectiveOptions {
  /**
   * The CUDA stream that writes the buffers (a `cudaStream_t`): the operation starts after what is in it. Whatever is
   * put into it after the operation has resolved sees the result. @default 0n, the legacy default stream
   */
  readonly stream?: bigint
}

/**
 * What ranks say to each other. Every rank calls the same operations in the same order with the same shapes; results
 * are bitwise equal on all ranks, because partial results are always added in rank order (with NCCL: in an order of its
 * own).
 *
 * The tests of `@rankwise/conformance` check it.
 *
 * @throws RankwiseError `RANK_LOST`, `COLLECTIVE_TIMEOUT`, `COLLECTIVE_MISMATCH`, `ABORTED`, `COLLECTIVES_DESTROYED` from
 * every operation; `RANK_LOST` and `COLLECTIVE_TIMEOUT` name the ranks in `actual.ranks`. Before anything is sent:
 * `COLLECTIVE_OP`, `COLLECTIVE_DTYPE`, `COLLECTIVE_SHAPE`, `COLLECTIVE_SOURCE`.
 */
export interface Collectives extends AsyncDisposable {
  readonly name: string
  readonly rank: number
  readonly worldSize: number
  /** Reduces all tensors in place, packed into one exchange. */
  allReduce(tensors: readonly Tensor[], options?: CollectiveOptions & { readonly op?: ReduceOp }): Promise<void>
  /**
   * As {@link allReduce}, where the memory of GPUs is, on collectives that reach it. It counts as another operation than
   * `allReduce`: all ranks call the same of the two. @default tensors of the host only
   */
  allReduceOnDevice?(
    buffers: readonly DeviceBuffer[],
    options?: DeviceOptions & { readonly op?: ReduceOp },
  ): Promise<void>
  /** Concatenates every rank's tensor along dim 0, in rank order; all ranks give the same shape. */
  allGather(tensor: Tensor, options?: CollectiveOptions): Promise<Tensor>
  /** Reduces and leaves each rank its `1 / worldSize` of dim 0. */
  reduceScatter(tensor: Tensor, options?: CollectiveOptions & { readonly op?: ReduceOp }): Promise<Tensor>
  /** Overwrites `tensor` with the content it has on rank `source`. @default source 0 */
  broadcast(tensor: Tensor, options?: CollectiveOptions & { readonly source?: number }): Promise<void>
  /** Resolves once every rank has called it. */
  barrier(options?: CollectiveOptions): Promise<void>
  /**
   * A tensor of zeros where {@link allReduce} needs no copy of it, on collectives that have such memory. Every rank calls
   * it, in the same order among all operations and with the same dtype and shape, and gets a tensor of its own.
   * Disposing of it gives the memory back; so does {@link destroy}.
   */
  allocate?<D extends DType>(dtype: D, shape: Shape, options?: CollectiveOptions): Promise<Tensor<D> & Disposable>
  /**
   * Collectives of some of the ranks, as `torch.distributed.new_group` makes them, where the collectives can. Every rank
   * calls it with the same ranks; those that are named get the new collectives, numbered in ascending order of their
   * rank here, the others undefined. They are independent of these, and destroyed by themselves.
   */
  newGroup?(ranks: readonly number[], options?: CollectiveOptions): Promise<Collectives | undefined>
  /** Makes pending and later operations fail on every rank with `reason`; returns at once. */
  abort(reason: Error): void
  /** Leaves the group and frees what it held; idempotent. */
  destroy(): Promise<void>
}

/** How a process finds its group, as torchrun names it. */
export interface Rendezvous {
  readonly rank: number
  readonly localRank: number
  readonly worldSize: number
  readonly localWorldSize: number
  readonly masterAddr: string
  readonly masterPort: number
  /** Longest wait for peers and for any one operation, in milliseconds. */
  readonly timeoutMs: number
}

/**
 * Joins the group; a collectives package registers one under its name. It gets the options of `initProcessGroup`, and
 * refuses those that it does not have.
 */
export type CollectivesFactory = (rendezvous: Rendezvous, options?: object) => Promise<Collectives>

import {
  allocate,
  byteSizeOf,
  type CollectiveOptions,
  type DType,
  type ReduceOp,
  type Shape,
  sizeOf,
  type Tensor,
} from '@rankwise/core'
import { describeOperation, type Failure, failureError, type Operation, requireValid } from '@rankwise/core/collectives'
import type { KernelName } from './kernel.ts'
import type { LocalGroup } from './local-group.ts'
import { SharedTensor } from './shared-tensor.ts'

/** Collectives of a group of one: they check their arguments and have nothing to exchange. Works on every platform. */
export class SingleRankCollectives implements LocalGroup {
  readonly name = 'local'
  readonly rank = 0
  readonly worldSize = 1
  readonly transport = 'none'
  readonly transportReason = 'a group of one rank exchanges nothing'
  readonly kernel: KernelName
  #sequence = 0
  #failure: Failure | undefined

  constructor(kernel: KernelName) {
    this.kernel = kernel
  }

  async allReduce(
    tensors: readonly Tensor[],
    { op = 'sum', signal }: CollectiveOptions & { readonly op?: ReduceOp } = {},
  ): Promise<void> {
    this.#check({ kind: 'allReduce', reduceOp: op, tensors }, signal)
  }

  async allGather(tensor: Tensor, { signal }: CollectiveOptions = {}): Promise<Tensor> {
    this.#check({ kind: 'allGather', tensors: [tensor] }, signal)
    return tensor.clone()
  }

  async reduceScatter(
    tensor: Tensor,
    { op = 'sum', signal }: CollectiveOptions & { readonly op?: ReduceOp } = {},
  ): Promise<Tensor> {
    this.#check({ kind: 'reduceScatter', reduceOp: op, tensors: [tensor] }, signal)
    return tensor.clone()
  }

  async broadcast(
    tensor: Tensor,
    { source = 0, signal }: CollectiveOptions & { readonly source?: number } = {},
  ): Promise<void> {
    this.#check({ kind: 'broadcast', source, tensors: [tensor] }, signal)
  }

  async barrier({ signal }: CollectiveOptions = {}): Promise<void> {
    this.#check({ kind: 'barrier', tensors: [] }, signal)
  }

  async allocate<D extends DType>(
    dtype: D,
    shape: Shape,
    { signal }: CollectiveOptions = {},
  ): Promise<SharedTensor<D>> {
    this.#check({ kind: 'allocate', tensors: [{ dtype, shape, byteLength: byteSizeOf(shape, dtype) }] }, signal)
    // Nobody shares it: it is memory like any other, and nothing has to be given back.
    return new SharedTensor(dtype, shape, allocate(dtype, sizeOf(shape)), () => {})
  }

  async newGroup(ranks: readonly number[], { signal }: CollectiveOptions = {}): Promise<LocalGroup | undefined> {
    this.#check({ kind: 'newGroup', members: ranks, tensors: [] }, signal)
    return new SingleRankCollectives(this.kernel)
  }

  abort(reason: Error): void {
    this.#failure ??= {
      code: 'ABORTED',
      what: `rank 0 aborted the group: ${reason.message}`,
      ranks: [0],
      cause: reason,
    }
  }

  async destroy(): Promise<void> {
    this.#failure ??= {
      code: 'COLLECTIVES_DESTROYED',
      what: 'this rank has left the group',
      ranks: [],
      rule: 'no operation after destroy',
    }
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.destroy()
  }

  #check(call: Omit<Operation, 'sequence'>, signal: AbortSignal | undefined): void {
    this.#sequence += 1
    const operation = { ...call, sequence: this.#sequence }
    requireValid(operation, this.worldSize)
    if (signal?.aborted === true) {
      const what = `rank 0 aborted ${operation.kind} #${operation.sequence}`
      this.#failure ??= { code: 'ABORTED', what, ranks: [0], cause: signal.reason }
    }
    if (this.#failure !== undefined) throw failureError(this.#failure, describeOperation(operation))
  }
}

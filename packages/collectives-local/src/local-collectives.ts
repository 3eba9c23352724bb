import {
  allocate,
  byteSizeOf,
  type CollectiveOptions,
  type DType,
  RankwiseError,
  type ReduceOp,
  type Shape,
  sizeOf,
  Tensor,
  viewAs,
} from '@rankwise/core'
import { type Operation, requireValid } from '@rankwise/core/collectives'
import type { Completion } from './exchange.ts'
import type { KernelName } from './kernel.ts'
import type { LocalGroup } from './local-group.ts'
import { SharedTensor } from './shared-tensor.ts'
import { SingleRankCollectives } from './single-rank-collectives.ts'
import type { InPlace, Transport, TransportName } from './transport.ts'
import type { Turn } from './turn.ts'

/** Who is in a group, and what it was made with. */
export interface LocalIdentity {
  readonly rank: number
  readonly kernel: KernelName
  /** Why the group has its transport. */
  readonly transportReason: string
}

/** Collectives of the ranks of one machine. Operations that are called without waiting run one after the other. */
export class LocalCollectives implements LocalGroup {
  readonly name = 'local'
  readonly rank: number
  readonly worldSize: number
  readonly kernel: KernelName
  readonly transport: TransportName
  readonly transportReason: string
  readonly #transport: Transport
  #sequence = 0
  #pending = 0
  #last: Promise<unknown> = Promise.resolve()
  #destroyed: Promise<void> | undefined

  /** Takes over the transport. */
  constructor({ rank, kernel, transportReason }: LocalIdentity, transport: Transport) {
    this.rank = rank
    this.worldSize = transport.worldSize
    this.kernel = kernel
    this.transport = transport.name
    this.transportReason = transportReason
    this.#transport = transport
  }

  async allReduce(
    tensors: readonly Tensor[],
    { op = 'sum', signal }: CollectiveOptions & { readonly op?: ReduceOp } = {},
  ): Promise<void> {
    const inPlace = this.#transport.allocations.isEmpty
      ? undefined
      : tensors.map((tensor) => this.#transport.allocations.find(tensor))
    const places = inPlace?.flatMap((found) => found?.place ?? [])
    const pending = this.#run(
      { sequence: this.#next(), kind: 'allReduce', reduceOp: op, tensors, places },
      signal,
      (turn) => this.#reduceAll(turn, op, tensors, inPlace),
    )
    if (pending !== undefined) await pending
  }

  async allGather(tensor: Tensor, { signal }: CollectiveOptions = {}): Promise<Tensor> {
    return this.#run({ sequence: this.#next(), kind: 'allGather', tensors: [tensor] }, signal, async (turn) => {
      const output = this.#allocateRows(tensor, (tensor.shape[0] as number) * this.worldSize)
      await this.#transport.exchange.allGather(turn, bytesOf(tensor), bytesOf(output))
      return output
    })
  }

  async reduceScatter(
    tensor: Tensor,
    { op = 'sum', signal }: CollectiveOptions & { readonly op?: ReduceOp } = {},
  ): Promise<Tensor> {
    return this.#run(
      { sequence: this.#next(), kind: 'reduceScatter', reduceOp: op, tensors: [tensor] },
      signal,
      async (turn) => {
        const output = this.#allocateRows(tensor, (tensor.shape[0] as number) / this.worldSize)
        await this.#transport.exchange.reduceScatter(turn, tensor.dtype, op, tensor.data, output.data)
        return output
      },
    )
  }

  async broadcast(
    tensor: Tensor,
    { source = 0, signal }: CollectiveOptions & { readonly source?: number } = {},
  ): Promise<void> {
    const pending = this.#run(
      { sequence: this.#next(), kind: 'broadcast', source, tensors: [tensor] },
      signal,
      (turn) => this.#transport.exchange.broadcast(turn, source, bytesOf(tensor)),
    )
    if (pending !== undefined) await pending
  }

  async barrier({ signal }: CollectiveOptions = {}): Promise<void> {
    const pending = this.#run({ sequence: this.#next(), kind: 'barrier', tensors: [] }, signal, (turn) =>
      this.#transport.exchange.barrier(turn),
    )
    if (pending !== undefined) await pending
  }

  async allocate<D extends DType>(
    dtype: D,
    shape: Shape,
    { signal }: CollectiveOptions = {},
  ): Promise<SharedTensor<D>> {
    const layout = { dtype, shape, byteLength: byteSizeOf(shape, dtype) }
    const memory = await this.#run({ sequence: this.#next(), kind: 'allocate', tensors: [layout] }, signal, (turn) =>
      this.#transport.allocate(turn, layout.byteLength),
    )
    if (memory instanceof RankwiseError) throw memory
    const { bytes, release } = memory
    return new SharedTensor(dtype, shape, viewAs(dtype, bytes), () => this.#whenIdle(release))
  }

  async newGroup(ranks: readonly number[], { signal }: CollectiveOptions = {}): Promise<LocalGroup | undefined> {
    const members = [...ranks].sort((a, b) => a - b)
    const transport = await this.#run(
      { sequence: this.#next(), kind: 'newGroup', members, tensors: [] },
      signal,
      (turn) => (members.length === 1 ? undefined : this.#transport.split(turn, members)),
    )
    if (transport instanceof RankwiseError) throw transport
    const rank = members.indexOf(this.rank)
    if (rank < 0) return undefined
    if (transport === undefined) return new SingleRankCollectives(this.kernel)
    return new LocalCollectives({ rank, kernel: this.kernel, transportReason: this.transportReason }, transport)
  }

  abort(reason: Error): void {
    if (this.#destroyed !== undefined) return
    const what = `rank ${this.rank} aborted the group: ${reason.message}`
    this.#transport.fail({ code: 'ABORTED', what, ranks: [this.rank], cause: reason })
  }

  destroy(): Promise<void> {
    this.#destroyed ??= this.#leave()
    return this.#destroyed
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.destroy()
  }

  async #leave(): Promise<void> {
    this.#transport.leave()
    await this.#last
    await this.#transport.close()
  }

  /** A call takes a number even if it is refused: a rank that goes on after it must not be taken for in step. */
  #next(): number {
    this.#sequence += 1
    return this.#sequence
  }

  #run<T>(operation: Operation, signal: AbortSignal | undefined, body: (turn: Turn) => Promise<T> | T): Promise<T> | T {
    requireValid(operation, this.worldSize)
    if (this.#pending > 0) return this.#follow(this.#last.then(() => this.#transport.run(operation, signal, body)))
    const result = this.#transport.run(operation, signal, body)
    return result instanceof Promise ? this.#follow(result) : result
  }

  /** The next operation starts when this one has ended. */
  #follow<T>(result: Promise<T>): Promise<T> {
    const settle = () => {
      this.#pending -= 1
    }
    this.#pending += 1
    this.#last = result.then(settle, settle)
    return result
  }

  #whenIdle(action: () => void): void {
    if (this.#pending === 0) action()
    else void this.#last.then(action)
  }

  /** Tensors of one dtype travel as one; those in shared memory stay where they are. */
  #reduceAll(
    turn: Turn,
    op: ReduceOp,
    tensors: readonly Tensor[],
    inPlace: readonly (InPlace | undefined)[] | undefined,
  ): Completion {
    const [tensor] = tensors
    if (tensors.length === 1 && tensor !== undefined && inPlace?.[0] === undefined) {
      return this.#transport.exchange.allReduce(turn, tensor.dtype, op, [tensor.data])
    }
    return this.#reduceMany(turn, op, tensors, inPlace)
  }

  async #reduceMany(
    turn: Turn,
    op: ReduceOp,
    tensors: readonly Tensor[],
    inPlace: readonly (InPlace | undefined)[] = [],
  ): Promise<void> {
    for (const [i, { dtype }] of tensors.entries()) {
      const found = inPlace[i]
      if (found !== undefined) await found.reduce(turn, dtype, op)
    }
    const staged = tensors.filter((_, i) => inPlace[i] === undefined)
    for (const dtype of new Set(staged.map((tensor) => tensor.dtype))) {
      const arrays = staged.filter((tensor) => tensor.dtype === dtype).map(({ data }) => data)
      await this.#transport.exchange.allReduce(turn, dtype, op, arrays)
    }
  }

  #allocateRows({ dtype, shape }: Tensor, rows: number): Tensor {
    const outputShape = [rows, ...shape.slice(1)]
    return new Tensor(dtype, outputShape, allocate(dtype, sizeOf(outputShape)))
  }
}

function bytesOf({ data }: Tensor): Uint8Array {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
}

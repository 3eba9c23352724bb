import {
  type CollectiveOptions,
  type Collectives,
  RankwiseError,
  type ReduceOp,
  type Shape,
  sizeOf,
  Tensor,
  viewAs,
} from '@rankwise/core'
import { REDUCIBLE, reduceInOrder } from '../collectives/oracle.ts'
import { bytesOf } from '../collectives/plan.ts'

interface Arrival {
  readonly rank: number
  readonly signature: string
  readonly tensors: readonly Tensor[]
  readonly resolve: (all: readonly (readonly Tensor[])[]) => void
  readonly reject: (error: Error) => void
}

/** All ranks of a group in one process: what the suites run backends on, and the smallest collectives there are. */
export class InProcessGroup {
  readonly worldSize: number
  /** By rank: calls that are not waited for queue up. */
  readonly #arrivals: Arrival[][]
  /** Why a rank cannot go on; by rank, since they learn of one failure in different words. */
  readonly #failures = new Map<number, Error>()

  constructor(worldSize: number) {
    this.worldSize = worldSize
    this.#arrivals = Array.from({ length: worldSize }, () => [])
  }

  member(rank: number): Collectives {
    return new InProcessCollectives(this, rank)
  }

  /** Resolves with what every rank brought, in rank order, once all have come. */
  meet(rank: number, signature: string, tensors: readonly Tensor[]): Promise<readonly (readonly Tensor[])[]> {
    return new Promise((resolve, reject) => {
      const failure = this.#failures.get(rank)
      if (failure !== undefined) return reject(failure)
      this.#arrivals[rank]?.push({ rank, signature, tensors, resolve, reject })
      if (this.#arrivals.every((queue) => queue.length > 0)) this.#exchange()
    })
  }

  /** Fails what is pending and what comes later. */
  fail(errorFor: (rank: number) => Error): void {
    for (let rank = 0; rank < this.worldSize; rank++) {
      if (!this.#failures.has(rank)) this.#failures.set(rank, errorFor(rank))
    }
    for (const queue of this.#arrivals) {
      for (const { rank, reject } of queue.splice(0)) reject(this.#failures.get(rank) as Error)
    }
  }

  #exchange(): void {
    const arrivals = this.#arrivals.map((queue) => queue.shift() as Arrival)
    const signatures = arrivals.map(({ signature }) => signature)
    if (new Set(signatures).size > 1) {
      for (const { rank, reject } of arrivals) reject(mismatch(rank, signatures))
      this.fail((rank) => mismatch(rank, signatures))
      return
    }
    // Copies: an operation may write into its own tensors while another rank still reads them.
    const brought = arrivals.map(({ tensors }) => tensors.map((tensor) => tensor.clone()))
    for (const { resolve } of arrivals) resolve(brought)
  }
}

function mismatch(rank: number, signatures: readonly string[]): RankwiseError {
  return new RankwiseError('COLLECTIVE_MISMATCH', 'ranks are at different operations', {
    where: `rank ${rank}`,
    actual: Object.fromEntries(signatures.map((signature, at) => [`rank ${at} at`, signature])),
  })
}

class InProcessCollectives implements Collectives {
  readonly name = 'in-process'
  readonly rank: number
  readonly worldSize: number
  readonly #group: InProcessGroup
  #isDestroyed = false

  constructor(group: InProcessGroup, rank: number) {
    this.#group = group
    this.rank = rank
    this.worldSize = group.worldSize
  }

  async allReduce(tensors: readonly Tensor[], options: CollectiveOptions & { readonly op?: ReduceOp } = {}) {
    const { op = 'sum' } = options
    requireReducible(tensors, op)
    const ranks = await this.#meet(`allReduce ${op} ${typesOf(tensors)}`, tensors, options)
    for (const [i, tensor] of tensors.entries()) bytesOf(tensor).set(reduced(ranks, i, op))
  }

  async reduceScatter(tensor: Tensor, options: CollectiveOptions & { readonly op?: ReduceOp } = {}): Promise<Tensor> {
    const { op = 'sum' } = options
    requireReducible([tensor], op)
    const rows = tensor.shape[0] ?? 0
    if (tensor.shape.length === 0 || rows % this.worldSize !== 0) throw badShape(tensor.shape)
    const ranks = await this.#meet(`reduceScatter ${op} ${typesOf([tensor])}`, [tensor], options)
    const whole = reduced(ranks, 0, op)
    const share = whole.length / this.worldSize
    const own = whole.slice(this.rank * share, (this.rank + 1) * share)
    return tensorOf(tensor, [rows / this.worldSize, ...tensor.shape.slice(1)], own)
  }

  async allGather(tensor: Tensor, options: CollectiveOptions = {}): Promise<Tensor> {
    const [rows, ...rest] = tensor.shape
    if (rows === undefined) throw badShape(tensor.shape)
    const ranks = await this.#meet(`allGather ${typesOf([tensor])}`, [tensor], options)
    const bytes = new Uint8Array(Buffer.concat(ranks.map(([part]) => bytesOf(part as Tensor))))
    return tensorOf(tensor, [rows * this.worldSize, ...rest], bytes)
  }

  async broadcast(tensor: Tensor, options: CollectiveOptions & { readonly source?: number } = {}): Promise<void> {
    const { source = 0 } = options
    if (!Number.isInteger(source) || source < 0 || source >= this.worldSize) {
      throw new RankwiseError('COLLECTIVE_SOURCE', `${source} is no rank of ${this.worldSize}`)
    }
    const ranks = await this.#meet(`broadcast ${source} ${typesOf([tensor])}`, [tensor], options)
    bytesOf(tensor).set(bytesOf(ranks[source]?.[0] as Tensor))
  }

  async barrier(options: CollectiveOptions = {}): Promise<void> {
    await this.#meet('barrier', [], options)
  }

  abort(reason: Error): void {
    const error = new RankwiseError('ABORTED', `rank ${this.rank} aborted the group: ${reason.message}`, {
      cause: reason,
    })
    this.#group.fail(() => error)
  }

  async destroy(): Promise<void> {
    if (this.#isDestroyed) return
    this.#isDestroyed = true
    this.#lose(`rank ${this.rank} left the group`, 'COLLECTIVES_DESTROYED')
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.destroy()
  }

  async #meet(signature: string, tensors: readonly Tensor[], { signal }: CollectiveOptions) {
    if (this.#isDestroyed) throw new RankwiseError('COLLECTIVES_DESTROYED', 'the group was left')
    const abort = () => this.#lose(`rank ${this.rank} aborted ${signature}`, 'ABORTED')
    if (signal?.aborted === true) abort()
    signal?.addEventListener('abort', abort, { once: true })
    try {
      return await this.#group.meet(this.rank, signature, tensors)
    } finally {
      signal?.removeEventListener('abort', abort)
    }
  }

  /** The others have lost this rank; it has its own code. */
  #lose(what: string, own: string): void {
    this.#group.fail((rank) => {
      return new RankwiseError(rank === this.rank ? own : 'RANK_LOST', what, { actual: { ranks: [this.rank] } })
    })
  }
}

function requireReducible(tensors: readonly Tensor[], op: ReduceOp): void {
  const other = tensors.find(({ dtype }) => !REDUCIBLE.includes(dtype))
  if (!['sum', 'max', 'min'].includes(op)) throw new RankwiseError('COLLECTIVE_OP', `'${op}' is no reduction`)
  if (other !== undefined) throw new RankwiseError('COLLECTIVE_DTYPE', `${other.dtype} cannot be reduced`)
}

function reduced(ranks: readonly (readonly Tensor[])[], index: number, op: ReduceOp): Uint8Array {
  const parts = ranks.map((tensors) => tensors[index] as Tensor)
  return reduceInOrder((parts[0] as Tensor).dtype, op, parts.map(bytesOf))
}

function tensorOf({ dtype }: Tensor, shape: Shape, bytes: Uint8Array): Tensor {
  const data = viewAs(dtype, bytes)
  return new Tensor(dtype, shape, data.subarray(0, sizeOf(shape)) as never)
}

function typesOf(tensors: readonly Tensor[]): string {
  return tensors.map(({ dtype, shape }) => `${dtype}[${shape.join()}]`).join(' ')
}

function badShape(shape: Shape): RankwiseError {
  return new RankwiseError('COLLECTIVE_SHAPE', 'the rows cannot be joined or dealt out', { actual: { shape } })
}

import type { Collectives } from '../src/collectives.ts'
import { RankwiseError } from '../src/errors.ts'
import type { Float64Tensor } from '../src/reference/index.ts'
import type { Tensor } from '../src/tensor.ts'
import { sumOf } from './support.ts'

/** All ranks of a group in one process; they may run concurrently. */
export class MemoryGroup {
  readonly worldSize: number
  /** Number of all-reduces so far. */
  exchanges = 0
  #waiting: { readonly rank: number; readonly tensors: readonly Tensor[]; readonly settle: Settle }[] = []

  constructor(worldSize: number) {
    this.worldSize = worldSize
  }

  member(rank: number): Collectives {
    return new MemoryCollectives(this, rank)
  }

  /** Resolves when every rank has called it; sums in rank order, in place. */
  allReduce(rank: number, tensors: readonly Tensor[], signal: AbortSignal | undefined): Promise<void> {
    return new Promise((resolve, reject) => {
      this.#waiting.push({ rank, tensors, settle: { resolve, reject } })
      signal?.addEventListener('abort', () => this.#fail(rank), { once: true })
      if (this.#waiting.length === this.worldSize) this.#exchange()
    })
  }

  #exchange(): void {
    const ranks = this.#waiting.sort((a, b) => a.rank - b.rank)
    this.#waiting = []
    this.exchanges++
    for (const [i] of (ranks[0]?.tensors ?? []).entries()) {
      const parts = ranks.map(({ tensors }) => tensors[i] as Float64Tensor)
      const sum = sumOf(parts)
      for (const part of parts) part.data.set(sum.data)
    }
    for (const { settle } of ranks) settle.resolve()
  }

  #fail(aborted: number): void {
    const waiting = this.#waiting
    this.#waiting = []
    for (const { rank, settle } of waiting) {
      settle.reject(new RankwiseError(rank === aborted ? 'ABORTED' : 'RANK_LOST', `rank ${aborted} gave up`))
    }
  }
}

interface Settle {
  readonly resolve: () => void
  readonly reject: (error: Error) => void
}

class MemoryCollectives implements Collectives {
  readonly name = 'memory'
  readonly rank: number
  readonly worldSize: number
  readonly #group: MemoryGroup

  constructor(group: MemoryGroup, rank: number) {
    this.#group = group
    this.rank = rank
    this.worldSize = group.worldSize
  }

  allReduce(tensors: readonly Tensor[], { signal }: { readonly signal?: AbortSignal | undefined } = {}): Promise<void> {
    return this.#group.allReduce(this.rank, tensors, signal)
  }

  allGather(): never {
    throw new Error('an executor only all-reduces')
  }

  reduceScatter(): never {
    throw new Error('an executor only all-reduces')
  }

  broadcast(): never {
    throw new Error('an executor only all-reduces')
  }

  barrier(): never {
    throw new Error('an executor only all-reduces')
  }

  abort(): void {}

  async destroy(): Promise<void> {}

  async [Symbol.asyncDispose](): Promise<void> {}
}

import { type CollectiveOptions, type Collectives, RankwiseError, type Tensor } from '@rankwise/core'

interface Waiting {
  readonly rank: number
  readonly tensors: readonly Tensor[]
  readonly settle: { readonly resolve: () => void; readonly reject: (error: Error) => void }
}

/** Ranks of one process that take turns: what an executor needs of collectives, and nothing else. */
export class InProcessGroup {
  readonly worldSize: number
  #waiting: Waiting[] = []
  #failure: Error | undefined

  constructor(worldSize: number) {
    this.worldSize = worldSize
  }

  member(rank: number): Collectives {
    return new InProcessCollectives(this, rank)
  }

  /** Resolves when every rank has called it; sums in rank order, in place. */
  allReduce(rank: number, tensors: readonly Tensor[]): Promise<void> {
    return new Promise((resolve, reject) => {
      if (this.#failure !== undefined) return reject(this.#failure)
      this.#waiting.push({ rank, tensors, settle: { resolve, reject } })
      if (this.#waiting.length === this.worldSize) this.#exchange()
    })
  }

  abort(reason: Error): void {
    this.#failure ??= reason
    for (const { settle } of this.#waiting.splice(0)) settle.reject(reason)
  }

  #exchange(): void {
    const ranks = this.#waiting.sort((a, b) => a.rank - b.rank)
    this.#waiting = []
    for (const [i, first] of (ranks[0] as Waiting).tensors.entries()) {
      const sum = sumOf(ranks.map(({ tensors }) => tensors[i] as Tensor)).cast(first.dtype)
      for (const { tensors } of ranks) (tensors[i] as Tensor<'float32'>).data.set((sum as Tensor<'float32'>).data)
    }
    for (const { settle } of ranks) settle.resolve()
  }
}

/** In float64. */
function sumOf(parts: readonly Tensor[]): Tensor<'float64'> {
  const [first, ...others] = parts.map((part) => part.cast('float64'))
  const sum = (first as Tensor<'float64'>).clone()
  for (const { data } of others) {
    for (const [i, value] of data.entries()) sum.data[i] = (sum.data[i] as number) + value
  }
  return sum
}

class InProcessCollectives implements Collectives {
  readonly name = 'in-process'
  readonly rank: number
  readonly worldSize: number
  readonly #group: InProcessGroup

  constructor(group: InProcessGroup, rank: number) {
    this.#group = group
    this.rank = rank
    this.worldSize = group.worldSize
  }

  allReduce(tensors: readonly Tensor[], _options?: CollectiveOptions): Promise<void> {
    return this.#group.allReduce(this.rank, tensors)
  }

  abort(reason: Error): void {
    this.#group.abort(reason)
  }

  allGather(): never {
    throw onlyAllReduce()
  }

  reduceScatter(): never {
    throw onlyAllReduce()
  }

  broadcast(): never {
    throw onlyAllReduce()
  }

  barrier(): never {
    throw onlyAllReduce()
  }

  async destroy(): Promise<void> {}

  async [Symbol.asyncDispose](): Promise<void> {}
}

function onlyAllReduce(): RankwiseError {
  return new RankwiseError('COLLECTIVES_IN_PROCESS', 'ranks of one process only all-reduce')
}

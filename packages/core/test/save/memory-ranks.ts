import type { Collectives } from '../../src/collectives.ts'
import { RankwiseError } from '../../src/errors.ts'
import { Tensor } from '../../src/tensor.ts'

interface Call {
  readonly kind: string
  readonly data: Uint8Array
  readonly resolve: (all: readonly Uint8Array[]) => void
  readonly reject: (error: Error) => void
}

/** Ranks in one process that gather and broadcast bytes; they wait for each other as real ones do. */
export class MemoryRanks {
  readonly worldSize: number
  #calls = new Map<number, Call>()
  #lost: RankwiseError | undefined

  constructor(worldSize: number) {
    this.worldSize = worldSize
  }

  /** Runs a function on every rank. Fails if one still waits for the others when all of them are done. */
  async run<T>(body: (collectives: Collectives, rank: number) => Promise<T>): Promise<PromiseSettledResult<T>[]> {
    const ranks = Array.from({ length: this.worldSize }, (_, rank) => body(this.member(rank), rank))
    const results = await Promise.allSettled(ranks)
    if (this.#calls.size > 0) throw new Error(`ranks ${[...this.#calls.keys()].join(', ')} were left waiting`)
    return results
  }

  /** Fails everything that waits, and what is called later, as after the death of a rank. */
  lose(rank: number): void {
    this.#lost = new RankwiseError('RANK_LOST', `rank ${rank} is gone`)
    for (const call of this.#calls.values()) call.reject(this.#lost)
    this.#calls.clear()
  }

  member(rank: number): Collectives {
    const unexpected = () => Promise.reject(new Error('not part of saving'))
    return {
      name: 'memory',
      rank,
      worldSize: this.worldSize,
      allReduce: unexpected,
      reduceScatter: unexpected,
      barrier: unexpected,
      allGather: async (tensor) => {
        const all = await this.#exchange(rank, 'allGather', tensor.data as Uint8Array)
        return new Tensor('uint8', [all.length * tensor.data.length], Uint8Array.from(Buffer.concat(all)))
      },
      broadcast: async (tensor, { source = 0 } = {}) => {
        const all = await this.#exchange(rank, 'broadcast', (tensor.data as Uint8Array).slice())
        ;(tensor.data as Uint8Array).set(all[source] as Uint8Array)
      },
      abort: () => {},
      destroy: async () => {},
      [Symbol.asyncDispose]: async () => {},
    }
  }

  #exchange(rank: number, kind: string, data: Uint8Array): Promise<readonly Uint8Array[]> {
    if (this.#lost !== undefined) return Promise.reject(this.#lost)
    return new Promise((resolve, reject) => {
      this.#calls.set(rank, { kind, data, resolve, reject })
      if (this.#calls.size < this.worldSize) return
      const calls = [...this.#calls].sort(([a], [b]) => a - b).map(([, call]) => call)
      this.#calls = new Map()
      const kinds = new Set(calls.map((call) => call.kind))
      for (const call of calls) {
        if (kinds.size > 1) call.reject(new Error(`ranks differ: ${[...kinds].join(', ')}`))
        else call.resolve(calls.map((other) => other.data))
      }
    })
  }
}

import type { Verdict } from '@rankwise/core/collectives'
import type { ScopedStore } from './scoped-store.ts'

/** What a rank tells all others. */
export type Notice =
  | { readonly kind: 'failed'; readonly verdict: Verdict }
  /** `sequence` is the last operation that the rank has completed. */
  | { readonly kind: 'left'; readonly rank: number; readonly sequence: number }

/** A notice is counted after it is written, so it is there, unless its writer died between the two. */
const READ_MS = 500

/**
 * What ranks tell each other beside NCCL, through the store: who failed, who left, and how far everybody is. A rank asks
 * only while it waits, and counters answer at once, so an idle group and a fast operation cost nothing.
 */
export class NoticeBoard {
  readonly #store: ScopedStore
  readonly #rank: number
  #read = 0
  #arrived = 0

  constructor(store: ScopedStore, rank: number) {
    this.#store = store
    this.#rank = rank
  }

  async publish(notice: Notice): Promise<void> {
    const number = await this.#store.add('notices/claimed', 1)
    await this.#store.set(`notices/${number}`, notice)
    await this.#store.add('notices/written', 1)
  }

  /** Notices of all ranks, this one included, that were not read before; oldest first. */
  async news(): Promise<readonly Notice[]> {
    const written = await this.#store.add('notices/written', 0)
    const notices: Notice[] = []
    while (this.#read < written) {
      notices.push(await this.#store.get(`notices/${this.#read + 1}`, { signal: AbortSignal.timeout(READ_MS) }))
      this.#read += 1
    }
    return notices
  }

  /** Tells that this rank has called operation `sequence`. */
  async arrive(sequence: number): Promise<void> {
    const steps = sequence - this.#arrived
    this.#arrived = sequence
    if (steps > 0) await this.#store.add(`arrived/${this.#rank}`, steps)
  }

  /** The last operation that each rank has told of; ranks tell only of those that they wait for. */
  arrivals(worldSize: number): Promise<readonly number[]> {
    return Promise.all(Array.from({ length: worldSize }, (_, rank) => this.#store.add(`arrived/${rank}`, 0)))
  }
}

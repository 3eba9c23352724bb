import { PrefixStore, RankwiseError, type Store } from '@rankwise/core'
import { nameRanks } from '@rankwise/core/collectives'
import { isGone, type Member } from './member.ts'
import { type Fields, receive, send } from './message.ts'

/** How often a rank that waits looks whether the processes of the others still run: 15 us each. */
const LOOK_MS = 100

/** The ranks of one group on their way into it, as one of them sees it: what they tell each other in the store. */
export class Meeting implements Disposable {
  readonly #store: Store
  readonly #end = new AbortController()
  readonly #timer: NodeJS.Timeout
  readonly #signal: AbortSignal | undefined
  readonly #onAbort = () => this.#end.abort(this.#signal?.reason)
  #isOver = false

  /**
   * @param timeoutMs how long the meeting may take
   * @param signal ends it
   */
  constructor(store: Store, timeoutMs: number, signal?: AbortSignal) {
    this.#store = new PrefixStore('collectives-local', store)
    this.#signal = signal
    this.#timer = setTimeout(() => {
      this.#isOver = true
      this.#end.abort()
    }, timeoutMs)
    signal?.addEventListener('abort', this.#onAbort)
    if (signal?.aborted === true) this.#onAbort()
  }

  /** Aborted when nothing is waited for any more. */
  get signal(): AbortSignal {
    return this.#end.signal
  }

  /** Whether this rank has been told to give up. */
  get isAborted(): boolean {
    return this.#signal?.aborted === true
  }

  /** Whether the time was over before the meeting was. */
  get isOver(): boolean {
    return this.#isOver
  }

  send(key: string, message: unknown): Promise<void> {
    return send(this.#store, key, message)
  }

  /**
   * What a rank tells under a key, once it does.
   *
   * @throws RankwiseError with the code of the error that the rank told instead
   */
  receive(key: string): Promise<Fields> {
    const message = receive(this.#store, key, { signal: this.#end.signal })
    // It may fail when nobody waits for it any more.
    message.catch(() => {})
    return message
  }

  /** How many have claimed to be this rank, with this call. */
  claim(rank: number): Promise<number> {
    return this.#store.add(`claims/${rank}`, 1)
  }

  /**
   * The result of `pending`, unless a process ends first that can be looked at.
   *
   * @param members may grow meanwhile
   * @throws RankwiseError `RANK_LOST`
   */
  async unlessLost<T>(pending: Promise<T>, members: readonly Member[]): Promise<T> {
    let timer: NodeJS.Timeout | undefined
    const loss = new Promise<never>((_, reject) => {
      timer = setInterval(() => {
        const gone = members.filter(isGone).map(({ rank }) => rank)
        if (gone.length > 0) reject(lost(gone))
      }, LOOK_MS)
    })
    try {
      return await Promise.race([pending, loss])
    } finally {
      clearInterval(timer)
    }
  }

  /** Ends all waits. */
  [Symbol.dispose](): void {
    clearTimeout(this.#timer)
    this.#signal?.removeEventListener('abort', this.#onAbort)
    this.#end.abort()
  }
}

function lost(ranks: readonly number[]): RankwiseError {
  const were = ranks.length === 1 ? 'was' : 'were'
  return new RankwiseError('RANK_LOST', `${nameRanks(ranks)} ${were} lost before the group was complete`, {
    where: 'rendezvous',
    actual: { ranks },
    remedy: 'look at the output of the lost rank for the first error',
  })
}

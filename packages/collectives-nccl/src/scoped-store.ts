import type { Store, StoreWaitOptions } from '@rankwise/core'

/** The keys of one group in a store that may serve several, one after another: values in a store are never removed. */
export class ScopedStore {
  readonly #store: Store
  readonly #prefix: string

  private constructor(store: Store, prefix: string) {
    this.#store = store
    this.#prefix = prefix
  }

  /** The n-th group that `rank` joins on a store is the n-th of every rank. */
  static async open(store: Store, rank: number): Promise<ScopedStore> {
    const group = await store.add(`nccl/groups/${rank}`, 1)
    return new ScopedStore(store, `nccl/${group}/`)
  }

  set(key: string, value: unknown): Promise<void> {
    return this.#store.set(this.#prefix + key, new TextEncoder().encode(JSON.stringify(value)))
  }

  async get<T>(key: string, options?: StoreWaitOptions): Promise<T> {
    return JSON.parse(new TextDecoder().decode(await this.#store.get(this.#prefix + key, options))) as T
  }

  add(key: string, amount: number): Promise<number> {
    return this.#store.add(this.#prefix + key, amount)
  }
}

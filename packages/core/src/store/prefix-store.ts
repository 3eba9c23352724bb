import type { Store, StoreWaitOptions } from '../store.ts'

/** A part of a store: all keys get a prefix, as in torch's class of this name. Closing it closes the store. */
export class PrefixStore implements Store {
  readonly #prefix: string
  readonly #store: Store

  /** @param prefix put before each key, with a slash */
  constructor(prefix: string, store: Store) {
    this.#prefix = prefix
    this.#store = store
  }

  set(key: string, value: Uint8Array): Promise<void> {
    return this.#store.set(this.#name(key), value)
  }

  get(key: string, options?: StoreWaitOptions): Promise<Uint8Array> {
    return this.#store.get(this.#name(key), options)
  }

  add(key: string, amount: number): Promise<number> {
    return this.#store.add(this.#name(key), amount)
  }

  close(): Promise<void> {
    return this.#store.close()
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close()
  }

  #name(key: string): string {
    return `${this.#prefix}/${key}`
  }
}

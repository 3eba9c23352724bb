import type { Store } from '@rankwise/core'

/** A store for a group of one process. */
export class MemoryStore implements Store {
  readonly #values = new Map<string, Uint8Array>()
  readonly #counters = new Map<string, number>()

  async set(key: string, value: Uint8Array): Promise<void> {
    this.#values.set(key, value)
  }

  async get(key: string): Promise<Uint8Array> {
    const value = this.#values.get(key)
    if (value === undefined) throw new Error(`nobody else can set ${key}`)
    return value
  }

  async add(key: string, amount: number): Promise<number> {
    const sum = (this.#counters.get(key) ?? 0) + amount
    this.#counters.set(key, sum)
    return sum
  }

  async close(): Promise<void> {}

  async [Symbol.asyncDispose](): Promise<void> {}
}

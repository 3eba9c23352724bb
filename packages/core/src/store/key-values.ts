interface Waiter {
  readonly missing: Set<string>
  readonly wake: () => void
}

/** What a store holds: values and queues under keys, and who waits for them. Keys have one byte per character. */
export class KeyValues {
  readonly #values = new Map<string, Buffer>()
  readonly #queues = new Map<string, Buffer[]>()
  readonly #waiters = new Map<string, Set<Waiter>>()
  #byteLength = 0

  /** Bytes of all keys and values. */
  get byteLength(): number {
    return this.#byteLength
  }

  /** Number of values; queues do not count. */
  get size(): number {
    return this.#values.size
  }

  /** Keys of values, without those of queues. */
  keys(): string[] {
    return [...this.#values.keys()]
  }

  has(key: string): boolean {
    return this.#values.has(key) || this.queueLength(key) > 0
  }

  get(key: string): Buffer | undefined {
    return this.#values.get(key)
  }

  set(key: string, value: Buffer): void {
    this.delete(key)
    this.#values.set(key, value)
    this.#byteLength += key.length + value.length
    this.wake(key)
  }

  /** @returns the new sum; undefined when the value is not an integer, and then nothing changes */
  add(key: string, amount: bigint): bigint | undefined {
    const text = this.#values.get(key)?.toString('latin1') ?? '0'
    if (!/^-?\d+$/.test(text)) return undefined
    const sum = BigInt.asIntN(64, BigInt(text) + amount)
    this.set(key, Buffer.from(String(sum)))
    return sum
  }

  append(key: string, value: Buffer): void {
    const before = this.#values.get(key)
    this.set(key, before === undefined ? value : Buffer.concat([before, value]))
  }

  /** @returns whether there was such a value */
  delete(key: string): boolean {
    const value = this.#values.get(key)
    if (value === undefined) return false
    this.#byteLength -= key.length + value.length
    return this.#values.delete(key)
  }

  push(key: string, element: Buffer): void {
    const queue = this.#queues.get(key) ?? []
    queue.push(element)
    this.#queues.set(key, queue)
    this.#byteLength += key.length + element.length
    this.wake(key)
  }

  /** @returns the oldest element of a queue */
  pop(key: string): Buffer | undefined {
    const queue = this.#queues.get(key)
    const element = queue?.shift()
    if (element !== undefined) this.#byteLength -= key.length + element.length
    if (queue?.length === 0) this.#queues.delete(key)
    return element
  }

  queueLength(key: string): number {
    return this.#queues.get(key)?.length ?? 0
  }

  /**
   * Calls `wake` once every key has been seen with a value: at once if all have one.
   *
   * @returns what ends the wait
   */
  whenPresent(keys: readonly string[], wake: () => void): () => void {
    const missing = new Set(keys.filter((key) => !this.has(key)))
    if (missing.size === 0) {
      wake()
      return () => {}
    }
    const waiter: Waiter = { missing, wake }
    for (const key of missing) this.#waitersOf(key).add(waiter)
    return () => {
      for (const key of missing) this.#forget(key, waiter)
    }
  }

  #waitersOf(key: string): Set<Waiter> {
    const waiters = this.#waiters.get(key) ?? new Set()
    this.#waiters.set(key, waiters)
    return waiters
  }

  #forget(key: string, waiter: Waiter): void {
    const waiters = this.#waiters.get(key)
    waiters?.delete(waiter)
    if (waiters?.size === 0) this.#waiters.delete(key)
  }

  /** Ends the waits for a key, as when it gets a value. */
  wake(key: string): void {
    const waiters = this.#waiters.get(key)
    this.#waiters.delete(key)
    for (const { missing, wake } of waiters ?? []) {
      missing.delete(key)
      if (missing.size === 0) wake()
    }
  }
}

import { setTimeout } from 'node:timers/promises'
import type { Store, StoreWaitOptions } from '@rankwise/core'
import type { StoreAnswer, StoreQuestion } from './ranks.ts'

/** The store of the tests, seen from a rank: the test process holds it, and answers over the channel of `fork`. */
export class IpcStore implements Store {
  readonly #pending = new Map<number, { resolve(value: unknown): void; reject(error: Error): void }>()
  #questions = 0
  /** Fails every question, as a store does whose process is gone. */
  broken: Error | undefined

  constructor() {
    process.on('message', (message: StoreAnswer | object) => {
      if ('answer' in message) this.#pending.get(message.answer)?.resolve(message.value)
    })
  }

  async set(key: string, value: Uint8Array): Promise<void> {
    await this.#ask({ set: key, value })
  }

  async get(key: string, { signal }: StoreWaitOptions = {}): Promise<Uint8Array> {
    for (;;) {
      signal?.throwIfAborted()
      const value = await this.#ask({ get: key })
      if (value !== undefined) return value as Uint8Array
      await setTimeout(5)
    }
  }

  async add(key: string, amount: number): Promise<number> {
    return (await this.#ask({ add: key, amount })) as number
  }

  async close(): Promise<void> {}

  [Symbol.asyncDispose](): Promise<void> {
    return this.close()
  }

  #ask(question: StoreQuestion): Promise<unknown> {
    if (this.broken !== undefined) return Promise.reject(this.broken)
    const id = ++this.#questions
    const answer = new Promise<unknown>((resolve, reject) => this.#pending.set(id, { resolve, reject }))
    process.send?.({ question: id, ...question })
    return answer.finally(() => this.#pending.delete(id))
  }
}

/** The store itself. */
export class StoreHost {
  readonly #values = new Map<string, Uint8Array>()
  readonly #counters = new Map<string, number>()

  answer(question: StoreQuestion): unknown {
    if ('set' in question) {
      this.#values.set(question.set, question.value)
      return undefined
    }
    if ('get' in question) return this.#values.get(question.get)
    const sum = (this.#counters.get(question.add) ?? 0) + question.amount
    this.#counters.set(question.add, sum)
    return sum
  }
}

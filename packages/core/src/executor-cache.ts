import type { GraphExecutor } from './executor.ts'

/** Shapes that a model keeps compiled. A picture size costs one entry of the transformer and one of the VAE. */
const CAPACITY = 8

interface Entry {
  readonly executor: Promise<GraphExecutor>
  users: number
}

/** The compiled graphs of a model by method and input shapes. The least recently used ones are freed. */
export class ExecutorCache {
  /** In the order of use, the latest last. */
  readonly #entries = new Map<string, Entry>()

  /** Runs `body` with the executor of `key`, compiling it where there is none; it is not freed meanwhile. */
  async use<T>(
    key: string,
    compile: () => Promise<GraphExecutor>,
    body: (executor: GraphExecutor) => Promise<T>,
  ): Promise<T> {
    const entry = this.#take(key, compile)
    entry.users++
    try {
      return await body(await this.#compiled(key, entry))
    } finally {
      entry.users--
      await this.#evict()
    }
  }

  /** Frees all executors, also those in use: their runs fail with `EXECUTOR_DISPOSED`. */
  async dispose(): Promise<void> {
    const entries = [...this.#entries.values()]
    this.#entries.clear()
    for (const entry of entries) await disposeEntry(entry)
  }

  #take(key: string, compile: () => Promise<GraphExecutor>): Entry {
    const entry = this.#entries.get(key) ?? { executor: compile(), users: 0 }
    this.#entries.delete(key)
    this.#entries.set(key, entry)
    return entry
  }

  /** A graph that cannot be compiled is tried again the next time. */
  async #compiled(key: string, entry: Entry): Promise<GraphExecutor> {
    try {
      return await entry.executor
    } catch (error) {
      if (this.#entries.get(key) === entry) this.#entries.delete(key)
      throw error
    }
  }

  async #evict(): Promise<void> {
    for (const [key, entry] of this.#entries) {
      if (this.#entries.size <= CAPACITY) return
      if (entry.users > 0) continue
      this.#entries.delete(key)
      await disposeEntry(entry)
    }
  }
}

async function disposeEntry({ executor }: Entry): Promise<void> {
  const [result] = await Promise.allSettled([executor])
  if (result.status === 'fulfilled') await result.value.dispose()
}

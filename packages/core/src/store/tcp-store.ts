import { RankwiseError } from '../errors.ts'
import type { Store, StoreWaitOptions } from '../store.ts'
import type { ClientConnection } from './client-connection.ts'
import { ConnectionError } from './connection-error.ts'
import { storeClosed, waitFor } from './store-wait.ts'

/** What a client needs beside its first connection. */
export interface TcpStoreOptions {
  /** Opens a further connection to the same server; commands that are pending at the same time need one each. */
  readonly connect: (signal: AbortSignal) => Promise<ClientConnection>
  /** Longest wait of each operation. */
  readonly timeoutMs: number
  /** Who holds the store, for the error when it is gone. */
  readonly holder: { readonly name: string; readonly ranks: readonly number[] }
}

/** A client of a TCPStore server: of rank 0's or of torchrun's. */
export class TcpStore implements Store {
  readonly #options: TcpStoreOptions
  readonly #idle: ClientConnection[]
  readonly #closing = new AbortController()

  constructor(first: ClientConnection, options: TcpStoreOptions) {
    this.#idle = [first]
    this.#options = options
  }

  set(key: string, value: Uint8Array): Promise<void> {
    return this.#command(key, {}, (connection) => connection.set(key, value))
  }

  get(key: string, options: StoreWaitOptions = {}): Promise<Uint8Array> {
    return this.#command(key, options, (connection) => connection.get(key))
  }

  add(key: string, amount: number): Promise<number> {
    return this.#command(key, {}, (connection) => connection.add(key, amount))
  }

  async close(): Promise<void> {
    this.#closing.abort()
    for (const connection of this.#idle.splice(0)) connection.close()
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close()
  }

  async #command<T>(
    key: string,
    { signal }: StoreWaitOptions,
    run: (connection: ClientConnection) => Promise<T>,
  ): Promise<T> {
    if (this.#closing.signal.aborted) throw storeClosed(key)
    const stop = new AbortController()
    const close = () => stop.abort()
    this.#closing.signal.addEventListener('abort', close)
    try {
      const pending = this.#onConnection(run, stop.signal)
      return await waitFor(pending, { where: `key ${key}`, timeoutMs: this.#options.timeoutMs, signal, stop: close })
    } catch (error) {
      if (!(error instanceof ConnectionError)) throw error
      throw this.#closing.signal.aborted ? storeClosed(key) : this.#lost(error)
    } finally {
      this.#closing.signal.removeEventListener('abort', close)
    }
  }

  /** A connection whose command was stopped is closed: its answer may still come. */
  async #onConnection<T>(run: (connection: ClientConnection) => Promise<T>, signal: AbortSignal): Promise<T> {
    const connection = this.#idle.pop() ?? (await this.#options.connect(signal))
    const close = () => connection.close()
    signal.addEventListener('abort', close)
    try {
      if (signal.aborted) close()
      const result = await run(connection)
      if (!signal.aborted) this.#idle.push(connection)
      return result
    } catch (error) {
      close()
      throw error
    } finally {
      signal.removeEventListener('abort', close)
    }
  }

  #lost(cause: unknown): RankwiseError {
    const { name, ranks } = this.#options.holder
    return new RankwiseError('RANK_LOST', `${name} is gone, and the store with it`, {
      where: 'rendezvous',
      actual: ranks.length > 0 ? { ranks } : {},
      rule: 'the process that holds the store lives as long as the group',
      remedy: `look at the output of ${name} for the first error`,
      cause,
    })
  }
}

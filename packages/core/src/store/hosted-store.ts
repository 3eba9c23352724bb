import type { Store, StoreWaitOptions } from '../store.ts'
import { KeyValues } from './key-values.ts'
import { storeClosed, waitFor } from './store-wait.ts'
import type { TcpStoreServer } from './tcp-store-server.ts'
import { KEY_PREFIX } from './wire.ts'

/** The store as rank 0 sees it, which holds it; without a server, that of a rank that is alone. */
export class HostedStore implements Store {
  readonly #server: TcpStoreServer | undefined
  readonly #values: KeyValues
  readonly #timeoutMs: number
  readonly #closing = new AbortController()
  #closed: Promise<void> | undefined

  constructor(server: TcpStoreServer | undefined, timeoutMs: number) {
    this.#server = server
    this.#values = server?.values ?? new KeyValues()
    this.#timeoutMs = timeoutMs
  }

  async set(key: string, value: Uint8Array): Promise<void> {
    this.#requireOpen(key)
    this.#values.set(nameOf(key), Buffer.from(value))
  }

  async get(key: string, { signal }: StoreWaitOptions = {}): Promise<Uint8Array> {
    this.#requireOpen(key)
    const name = nameOf(key)
    let stop = () => {}
    const present = new Promise<void>((resolve, reject) => {
      const end = this.#values.whenPresent([name], resolve)
      const fail = () => reject(storeClosed(key))
      this.#closing.signal.addEventListener('abort', fail)
      stop = () => {
        end()
        this.#closing.signal.removeEventListener('abort', fail)
      }
    })
    await waitFor(present, { where: `key ${key}`, timeoutMs: this.#timeoutMs, signal, stop }).finally(stop)
    return this.#values.get(name) as Buffer
  }

  async add(key: string, amount: number): Promise<number> {
    this.#requireOpen(key)
    return Number(this.#values.add(nameOf(key), BigInt(amount)))
  }

  /** Frees the port at once, and waits up to 5 s for the other ranks to close theirs, so that they can read the rest. */
  close(): Promise<void> {
    this.#closing.abort()
    this.#closed ??= this.#server?.close() ?? Promise.resolve()
    return this.#closed
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close()
  }

  #requireOpen(key: string): void {
    if (this.#closing.signal.aborted) throw storeClosed(key)
  }
}

function nameOf(key: string): string {
  return KEY_PREFIX + key
}

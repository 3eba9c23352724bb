import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { createServer, type Server, type Socket } from 'node:net'
import { SESSION_BYTES, type Secret } from './handshake.ts'
import { KeyValues } from './key-values.ts'
import { ServerConnection, type ServerState } from './server-connection.ts'
import { LIMITS, type ServerLimits } from './server-limits.ts'

/** How long `close` waits for clients that still have something to read. */
const LINGER_MS = 5_000

/** How a server lets clients in. */
export interface StoreServerOptions {
  readonly secret: Secret
  readonly limits?: Partial<ServerLimits>
}

/**
 * A TCPStore server as torch's, that clients of torch can use. When there is a token, it does nothing for a connection
 * that has not proven to know it.
 */
export class TcpStoreServer implements ServerState {
  readonly values = new KeyValues()
  readonly secret: Secret
  readonly session = randomBytes(SESSION_BYTES)
  readonly limits: ServerLimits
  readonly #server: Server
  readonly #connections = new Map<Socket, ServerConnection>()

  private constructor({ secret, limits }: StoreServerOptions) {
    this.secret = secret
    this.limits = { ...LIMITS, ...limits }
    this.#server = createServer((socket) => this.#greet(socket))
  }

  /**
   * Listens at exactly this address. The server does not keep the process alive.
   *
   * @param port 0 for any free one
   * @throws what the system says when it cannot
   */
  static async listen(host: string, port: number, options: StoreServerOptions): Promise<TcpStoreServer> {
    const store = new TcpStoreServer(options)
    store.#server.listen(port, host)
    await once(store.#server, 'listening')
    // Such as running out of descriptors: connections that wait are accepted later.
    store.#server.on('error', () => {})
    store.#server.unref()
    return store
  }

  get port(): number {
    const address = this.#server.address()
    return address !== null && typeof address === 'object' ? address.port : 0
  }

  /**
   * Frees the port at once, and waits for the clients to leave before it cuts them off, so that they can read what was
   * set last; strangers are cut off at once.
   *
   * @param lingerMs longest wait for clients
   */
  async close(lingerMs = LINGER_MS): Promise<void> {
    const closed = new Promise((resolve) => this.#server.close(resolve))
    for (const connection of this.#connections.values()) if (!connection.isAdmitted) connection.destroy()
    const timer = setTimeout(() => {
      for (const connection of this.#connections.values()) connection.destroy()
    }, lingerMs)
    await closed
    clearTimeout(timer)
  }

  #greet(socket: Socket): void {
    if (this.#connections.size >= this.limits.connections) {
      socket.destroy()
      return
    }
    const connection = new ServerConnection(socket, this)
    this.#connections.set(socket, connection)
    socket.unref()
    socket.on('close', () => this.#connections.delete(socket))
    const strangers = [...this.#connections.values()].filter(({ isAdmitted }) => !isAdmitted)
    if (strangers.length > this.limits.strangers) strangers[0]?.destroy()
    void connection.serve()
  }
}

import { once } from 'node:events'
import { createConnection, type Socket } from 'node:net'
import { setTimeout } from 'node:timers/promises'
import { VALIDATE } from './recorded.ts'

/** A connection that sends any bytes. */
export class RawClient implements Disposable {
  readonly socket: Socket
  #received = Buffer.alloc(0)

  private constructor(socket: Socket) {
    this.socket = socket
    socket.on('error', () => {})
    socket.on('data', (chunk) => {
      this.#received = Buffer.concat([this.#received, chunk])
    })
  }

  static async connect(port: number): Promise<RawClient> {
    const socket = createConnection(port, '127.0.0.1')
    await once(socket, 'connect')
    return new RawClient(socket)
  }

  /** A client that the server takes for one of torch. */
  static async validated(port: number): Promise<RawClient> {
    const client = await RawClient.connect(port)
    client.send(VALIDATE)
    return client
  }

  send(hex: string | Buffer): void {
    this.socket.write(typeof hex === 'string' ? Buffer.from(hex, 'hex') : hex)
  }

  /** What has come, once it is `bytes` long or nothing more came for a moment. */
  async receive(bytes: number): Promise<string> {
    for (let i = 0; i < 20 && this.#received.length < Math.max(bytes, 1); i++) await setTimeout(bytes === 0 ? 1 : 20)
    const received = this.#received.toString('hex')
    this.#received = Buffer.alloc(0)
    return received
  }

  /** Whether the server ends the connection, within a second. */
  async isCutOff(): Promise<boolean> {
    for (let i = 0; i < 50 && !this.socket.destroyed; i++) await setTimeout(20)
    return this.socket.destroyed
  }

  [Symbol.dispose](): void {
    this.socket.destroy()
  }
}

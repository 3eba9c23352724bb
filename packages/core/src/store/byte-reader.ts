import type { Socket } from 'node:net'
import { ConnectionError } from './connection-error.ts'

const NOTHING = Buffer.alloc(0)

/**
 * Reads a connection piece by piece. What nobody reads stays in the kernel, so a peer that sends faster than it is
 * answered is slowed down instead of filling the memory.
 */
export class ByteReader {
  readonly #socket: Socket
  #closed = false
  #wake: () => void = () => {}
  readonly #onReadable = () => this.#wake()

  constructor(socket: Socket) {
    this.#socket = socket
    socket.on('readable', this.#onReadable)
    socket.on('error', () => {})
    socket.on('close', () => {
      this.#closed = true
      this.#wake()
    })
  }

  /** Leaves the rest of the connection to another reader. */
  detach(): void {
    this.#socket.off('readable', this.#onReadable)
  }

  /** @throws ConnectionError when the connection ends first */
  async bytes(length: number): Promise<Buffer> {
    if (length === 0) return NOTHING
    for (;;) {
      const bytes: Buffer | null = this.#socket.read(length)
      if (bytes?.length === length) return bytes
      // At the end of the stream, `read` gives what is left.
      if (bytes !== null || this.#closed || this.#socket.readableEnded) throw closed()
      await new Promise<void>((resolve) => {
        this.#wake = resolve
        if (this.#closed) resolve()
      })
    }
  }

  async uint8(): Promise<number> {
    return (await this.bytes(1)).readUInt8()
  }

  async uint32(): Promise<number> {
    return (await this.bytes(4)).readUInt32LE()
  }

  async int64(): Promise<bigint> {
    return (await this.bytes(8)).readBigInt64LE()
  }

  /**
   * A number of elements or bytes that follow.
   *
   * @throws ConnectionError when it exceeds `limit`, before any of them is read
   */
  async length(limit: number): Promise<number> {
    const length = (await this.bytes(8)).readBigUInt64LE()
    if (length > limit) throw new ConnectionError(`a length of ${length} came, the limit is ${limit}`)
    return Number(length)
  }

  /** Bytes behind their length. */
  async value(limit: number): Promise<Buffer> {
    return this.bytes(await this.length(limit))
  }

  /** A key: bytes, each of which is one character, so that every key keeps its bytes. */
  async key(limit: number): Promise<string> {
    return (await this.value(limit)).toString('latin1')
  }
}

function closed(): ConnectionError {
  return new ConnectionError('the connection was closed')
}

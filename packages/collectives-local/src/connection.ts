import type { Socket } from 'node:net'
import { endSocket } from './end-socket.ts'
import { LineReader } from './line-reader.ts'

/** The fields of a message; every message is an object. */
export type Message = Readonly<Record<string, unknown>>

/** Messages over a socket, one line of JSON each. It does not keep the process alive. */
export class Connection {
  onMessage: (message: Message) => void = () => {}
  /** Called once, when the connection is of no more use. */
  onEnd: (why: string) => void = () => {}
  readonly #socket: Socket
  readonly #reader: LineReader
  #ended = false

  /** @param limit longest accepted message, in bytes */
  constructor(socket: Socket, limit: number) {
    this.#socket = socket
    this.#reader = new LineReader(limit)
    socket.setNoDelay(true)
    socket.unref()
    socket.on('data', (chunk: Buffer) => this.#read(this.#reader.push(chunk)))
    socket.on('error', (error: NodeJS.ErrnoException) => this.#end(error.code ?? error.message))
    socket.on('close', () => this.#end('closed'))
  }

  set limit(bytes: number) {
    this.#reader.limit = bytes
  }

  send(message: Message): void {
    if (this.#socket.writable) this.#socket.write(`${JSON.stringify(message)}\n`)
  }

  /**
   * Ends the connection after what is still to be sent; nothing is reported any more. It goes on reading until the other
   * side ends as well: closing with bytes unread would reset the connection, and take from the other side what it was
   * sent last. Resolves when it has ended.
   */
  close(): Promise<void> {
    this.#ended = true
    return endSocket(this.#socket)
  }

  #read(lines: readonly string[] | undefined): void {
    const messages = lines?.map(parse)
    if (messages === undefined) this.#break('a message is too long')
    for (const message of messages ?? []) {
      if (message === undefined) this.#break('not a message')
      else if (!this.#ended) this.onMessage(message)
    }
  }

  #break(why: string): void {
    this.#end(why)
    this.#socket.destroy()
  }

  #end(why: string): void {
    if (this.#ended) return
    this.#ended = true
    this.onEnd(why)
  }
}

function parse(line: string): Message | undefined {
  try {
    const value: unknown = JSON.parse(line)
    return typeof value === 'object' && value !== null && !Array.isArray(value) ? (value as Message) : undefined
  } catch {
    return undefined
  }
}

import type { Socket } from 'node:net'
import { endSocket } from './end-socket.ts'

/** Bytes that are kept of what nobody reads yet; then the other side is slowed down. */
const QUEUE_BYTES = 2 ** 20

interface PendingRead {
  readonly target: Uint8Array
  filled: number
  readonly resolve: () => void
  readonly reject: (error: Error) => void
}

interface PendingSend {
  /** Number of the last write that is waited for. */
  readonly mark: number
  readonly resolve: () => void
  readonly reject: (error: Error) => void
}

/** A connection that carries data to and from one other rank. It does not keep the process alive. */
export class DataLink {
  /** Called once, when the other side ends the connection or it breaks. */
  onEnd: () => void = () => {}
  readonly #socket: Socket
  readonly #reads: PendingRead[] = []
  readonly #sends: PendingSend[] = []
  #queue: Buffer[] = []
  #queued = 0
  #written = 0
  #sent = 0
  #failure: Error | undefined
  #isEnded = false

  constructor(socket: Socket) {
    this.#socket = socket
    socket.on('data', (chunk: Buffer) => this.#receive(chunk))
    // Errors come before the end of the connection, which is what counts.
    socket.on('error', () => {})
    socket.on('end', () => this.#end())
    socket.on('close', () => this.#end())
  }

  /** Sends what is written until the next turn of the event loop in one piece. */
  gather(): void {
    this.#socket.cork()
    process.nextTick(() => this.#socket.uncork())
  }

  /**
   * Sends bytes, which must not change until they are {@link sent}.
   *
   * @returns number of this write
   */
  write(bytes: Uint8Array): number {
    this.#written += 1
    this.#socket.write(bytes, () => this.#confirm())
    return this.#written
  }

  /** Resolves when the kernel has taken what was written up to a write: it arrives even if this process ends. */
  sent(mark = this.#written): Promise<void> | undefined {
    if (this.#sent >= mark) return undefined
    return new Promise((resolve, reject) => {
      if (this.#failure !== undefined) reject(this.#failure)
      else this.#sends.push({ mark, resolve, reject })
    })
  }

  /** Fills `target` with what comes next; reads are served in their order. */
  read(target: Uint8Array): Promise<void> {
    return new Promise((resolve, reject) => {
      if (this.#failure !== undefined) return reject(this.#failure)
      this.#reads.push({ target, filled: 0, resolve, reject })
      if (this.#queued > 0 || target.length === 0) this.#serve()
    })
  }

  /** Lets every wait end with `error`, those that come as well. */
  interrupt(error: Error): void {
    this.#failure ??= error
    this.#queue = []
    this.#queued = 0
    for (const { reject } of [...this.#reads.splice(0), ...this.#sends.splice(0)]) reject(this.#failure)
    this.#socket.resume()
  }

  /** Drops the connection, and what was not sent yet. */
  destroy(): void {
    this.#isEnded = true
    this.#socket.destroy()
  }

  /** Ends the connection after what is still to be sent; resolves when the other side has ended it as well. */
  close(): Promise<void> {
    this.#isEnded = true
    return endSocket(this.#socket)
  }

  #confirm(): void {
    this.#sent += 1
    while (this.#sends[0] !== undefined && this.#sends[0].mark <= this.#sent) this.#sends.shift()?.resolve()
  }

  #receive(chunk: Buffer): void {
    if (this.#failure !== undefined) return
    this.#queue.push(chunk)
    this.#queued += chunk.length
    this.#serve()
  }

  /** Hands what has come to those that wait for it. */
  #serve(): void {
    for (let read = this.#reads[0]; read !== undefined; read = this.#reads[0]) {
      while (read.filled < read.target.length && this.#queued > 0) this.#fill(read)
      if (read.filled < read.target.length) break
      this.#reads.shift()
      read.resolve()
    }
    if (this.#queued >= QUEUE_BYTES) this.#socket.pause()
    else if (this.#socket.isPaused()) this.#socket.resume()
  }

  #fill(read: PendingRead): void {
    const [chunk] = this.#queue as [Buffer]
    const count = Math.min(chunk.length, read.target.length - read.filled)
    read.target.set(count === chunk.length ? chunk : chunk.subarray(0, count), read.filled)
    read.filled += count
    this.#queued -= count
    if (count === chunk.length) this.#queue.shift()
    else this.#queue[0] = chunk.subarray(count)
  }

  #end(): void {
    if (this.#isEnded) return
    this.#isEnded = true
    this.onEnd()
  }
}

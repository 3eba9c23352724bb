import { createConnection, type Socket } from 'node:net'
import { ByteReader } from './byte-reader.ts'
import { ConnectionError } from './connection-error.ts'
import {
  ANSWER,
  CHALLENGE,
  CHALLENGE_BYTES,
  encodeAnswer,
  HELLO,
  newNonce,
  type Secret,
  verifyChallenge,
} from './handshake.ts'
import { Command, int64, KEY_PREFIX, key, MAGIC, uint8, uint32, value } from './wire.ts'

/** Longest wait for the handshake before whoever listens is taken for another program. Rank 0 may be busy for a while. */
const HANDSHAKE_MS = 5_000

/** Longest answer that is accepted, in bytes. */
const MAX_VALUE_BYTES = 2 ** 24

const PING = 0x52_57_53_31

/** How a client connects to a server. */
export interface ConnectOptions {
  readonly host: string
  readonly port: number
  /** Of the handshake with a store of Rankwise; left out for torch's, which knows none. */
  readonly secret?: Secret | undefined
  /** Aborting it ends the attempt. */
  readonly signal: AbortSignal
}

/** A connection to a TCPStore server, ours or torch's: one command at a time. It does not keep the process alive. */
export class ClientConnection {
  readonly #socket: Socket
  readonly #reader: ByteReader
  #session = ''

  private constructor(socket: Socket) {
    this.#socket = socket
    this.#reader = new ByteReader(socket)
  }

  /** @throws ConnectionError when nobody answers there, or not as a store that knows the secret */
  static async open({ host, port, secret, signal }: ConnectOptions): Promise<ClientConnection> {
    signal.throwIfAborted()
    const socket = createConnection({ host, port, noDelay: true })
    const connection = new ClientConnection(socket)
    const abort = () => socket.destroy()
    const timer = setTimeout(abort, HANDSHAKE_MS)
    signal.addEventListener('abort', abort)
    try {
      await connection.#connected()
      await connection.#greet()
      if (secret !== undefined) await connection.#shakeHands(secret)
      socket.unref()
      return connection
    } catch (error) {
      socket.destroy()
      throw error
    } finally {
      clearTimeout(timer)
      signal.removeEventListener('abort', abort)
    }
  }

  /** Names the run of the server, in hexadecimal digits; empty without handshake. */
  get session(): string {
    return this.#session
  }

  /** @throws ConnectionError */
  async set(name: string, content: Uint8Array): Promise<void> {
    this.#send(uint8(Command.SET), key(KEY_PREFIX + name), value(content))
    // SET has no answer; that of PING comes after it.
    await this.#ping()
  }

  /** Waits until there is a value. @throws ConnectionError */
  async get(name: string): Promise<Uint8Array> {
    this.#send(uint8(Command.WAIT), int64(1), key(KEY_PREFIX + name))
    await this.#reader.uint8()
    return this.#get(name)
  }

  /** @throws ConnectionError */
  async add(name: string, amount: number): Promise<number> {
    this.#send(uint8(Command.ADD), key(KEY_PREFIX + name), int64(amount))
    return Number(await this.#reader.int64())
  }

  /** Closes the connection; a command without answer fails. */
  close(): void {
    this.#socket.destroy()
  }

  #connected(): Promise<void> {
    return new Promise((resolve, reject) => {
      const fail = (error?: unknown) =>
        reject(new ConnectionError(error instanceof Error ? error.message : 'the connection was closed'))
      this.#socket.once('connect', resolve).once('error', fail).once('close', fail)
    })
  }

  async #greet(): Promise<void> {
    this.#send(uint8(Command.VALIDATE), uint32(MAGIC))
    await this.#ping()
  }

  async #shakeHands(secret: Secret): Promise<void> {
    const hello = newNonce()
    await this.set(HELLO, hello)
    const transcript = verifyChallenge(secret, hello, await this.#get(CHALLENGE, CHALLENGE_BYTES))
    if (transcript === undefined) throw new ConnectionError('the store does not know the token of this launch')
    await this.set(ANSWER, encodeAnswer(secret, transcript))
    this.#session = Buffer.from(transcript.session).toString('hex')
  }

  async #get(name: string, limit = MAX_VALUE_BYTES): Promise<Buffer> {
    this.#send(uint8(Command.GET), key(KEY_PREFIX + name))
    return this.#reader.value(limit)
  }

  async #ping(): Promise<void> {
    this.#send(uint8(Command.PING), uint32(PING))
    if ((await this.#reader.uint32()) !== PING) throw new ConnectionError('who answers is no store')
  }

  #send(...parts: readonly Uint8Array[]): void {
    if (this.#socket.writable) this.#socket.write(Buffer.concat(parts))
  }
}

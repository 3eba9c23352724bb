import type { Socket } from 'node:net'
import { ByteReader } from './byte-reader.ts'
import { ConnectionError } from './connection-error.ts'
import type { Secret } from './handshake.ts'
import {
  ANSWER,
  CHALLENGE,
  encodeChallenge,
  HELLO,
  NONCE_BYTES,
  newNonce,
  type Transcript,
  verifyAnswer,
} from './handshake.ts'
import type { KeyValues } from './key-values.ts'
import type { ServerLimits } from './server-limits.ts'
import {
  Command,
  int64,
  KEY_PREFIX,
  key,
  MAGIC,
  NOT_READY,
  READY,
  STOP_WAITING,
  uint8,
  uint32,
  value,
  WAIT_CANCELED,
} from './wire.ts'

const EMPTY = Buffer.alloc(0)

/** What all connections of a server share. */
export interface ServerState {
  readonly values: KeyValues
  readonly secret: Secret
  readonly session: Uint8Array
  readonly limits: ServerLimits
}

/** What a stranger may send at a time: keys and values of the handshake are shorter. */
const STRANGER_BYTES = 64
/** Commands of a handshake, with those that torch's clients add. */
const STRANGER_COMMANDS = 8

/** One client of the server, from VALIDATE to the end. Whoever breaks a rule is cut off. */
export class ServerConnection {
  readonly #socket: Socket
  readonly #reader: ByteReader
  readonly #server: ServerState
  readonly #values: KeyValues
  readonly #timer: NodeJS.Timeout
  #transcript: Transcript | undefined
  #isValidated = false
  #isProven = false
  #strangerCommands = 0
  /** Ends the WAIT or BARRIER that has no answer yet. */
  #cancelWait: (() => void) | undefined

  constructor(socket: Socket, server: ServerState) {
    this.#socket = socket
    this.#server = server
    this.#values = server.values
    this.#reader = new ByteReader(socket)
    this.#timer = setTimeout(() => this.destroy(), server.limits.helloMs).unref()
    socket.on('close', () => {
      clearTimeout(this.#timer)
      this.#endWait()
    })
  }

  /** Whether the client may use the store: it speaks the protocol and knows the token, if there is one. */
  get isAdmitted(): boolean {
    return this.#isValidated && (this.#isProven || this.#server.secret.token === '')
  }

  destroy(): void {
    this.#socket.destroy()
  }

  /** Resolves when the connection has ended, however it does. */
  async serve(): Promise<void> {
    try {
      if ((await this.#reader.uint8()) !== Command.VALIDATE) return
      if ((await this.#reader.uint32()) !== MAGIC) return
      this.#isValidated = true
      this.#admit()
      for (;;) await this.#obey(await this.#reader.uint8())
    } catch (error) {
      if (!(error instanceof ConnectionError)) throw error
    } finally {
      this.destroy()
    }
  }

  async #obey(command: number): Promise<void> {
    if (!this.isAdmitted && ++this.#strangerCommands > STRANGER_COMMANDS) throw refused(command)
    const isCancel = command === Command.CANCEL_WAIT
    if (this.#cancelWait !== undefined && !isCancel) throw new ConnectionError('a command came during a wait')
    const handler = (this.isAdmitted ? this.#commands : this.#strangersCommands)[command]
    if (handler === undefined) throw refused(command)
    await handler()
    // A client that sends commands without reading the answers must not make them pile up here.
    if (this.#socket.writableNeedDrain) await this.#drained()
  }

  readonly #strangersCommands: Readonly<Record<number, () => Promise<void>>> = {
    [Command.PING]: async () => this.#reply(uint32(await this.#reader.uint32())),
    [Command.SET]: async () => {
      const name = await this.#reader.key(STRANGER_BYTES)
      const content = await this.#reader.value(STRANGER_BYTES)
      if (!this.#shakeHands(name, content)) throw refused(Command.SET)
    },
    // torch's clients wait for a key before they get it.
    [Command.WAIT]: async () => {
      if ((await this.#reader.length(1)) !== 1 || !this.#isChallenge(await this.#reader.key(STRANGER_BYTES))) {
        throw refused(Command.WAIT)
      }
      this.#reply(uint8(STOP_WAITING))
    },
    [Command.GET]: async () => {
      if (!this.#isChallenge(await this.#reader.key(STRANGER_BYTES))) throw refused(Command.GET)
      this.#replyChallenge()
    },
  }

  readonly #commands: Readonly<Record<number, () => Promise<void>>> = {
    [Command.PING]: async () => this.#reply(uint32(await this.#reader.uint32())),
    [Command.SET]: async () => {
      const [name, content] = [await this.#key(), await this.#value()]
      if (this.#shakeHands(name, content)) return
      this.#requireRoom(name, content)
      this.#values.set(name, content)
    },
    [Command.COMPARE_SET]: async () => {
      const [name, expected, desired] = [await this.#key(), await this.#value(), await this.#value()]
      this.#reply(value(this.#compareSet(name, expected, desired)))
    },
    [Command.GET]: async () => {
      const name = await this.#key()
      if (this.#isChallenge(name)) this.#replyChallenge()
      else this.#reply(value(this.#values.get(name) ?? EMPTY))
    },
    [Command.ADD]: async () => {
      const [name, amount] = [await this.#key(), await this.#reader.int64()]
      this.#requireRoom(name, EMPTY)
      const sum = this.#values.add(name, amount)
      if (sum === undefined) throw new ConnectionError(`${name} is not a number`)
      this.#reply(int64(sum))
    },
    [Command.CHECK]: async () => {
      const names = await this.#keys()
      this.#reply(uint8(names.every((name) => this.#values.has(name)) ? READY : NOT_READY))
    },
    [Command.WAIT]: async () => this.#wait(await this.#keys()),
    [Command.GET_NUM_KEYS]: async () => this.#reply(int64(this.#values.size)),
    [Command.DELETE_KEY]: async () => this.#reply(int64(this.#values.delete(await this.#key()) ? 1 : 0)),
    [Command.APPEND]: async () => {
      const [name, content] = [await this.#key(), await this.#value()]
      this.#requireRoom(name, content)
      this.#values.append(name, content)
    },
    [Command.MULTI_GET]: async () => {
      for (const name of await this.#keys()) this.#reply(value(this.#values.get(name) ?? EMPTY))
    },
    [Command.MULTI_SET]: async () => {
      const count = await this.#reader.length(this.#server.limits.keys)
      for (let i = 0; i < count; i++) {
        const [name, content] = [await this.#key(), await this.#value()]
        this.#requireRoom(name, content)
        this.#values.set(name, content)
      }
    },
    [Command.CANCEL_WAIT]: async () => {
      this.#endWait()
      this.#reply(uint8(WAIT_CANCELED))
    },
    [Command.QUEUE_PUSH]: async () => {
      const [name, content] = [await this.#key(), await this.#value()]
      this.#requireRoom(name, content)
      this.#values.push(name, content)
    },
    [Command.QUEUE_POP]: async () => {
      const element = this.#values.pop(await this.#key())
      this.#reply(element === undefined ? int64(0) : Buffer.concat([int64(1), value(element)]))
    },
    [Command.QUEUE_LEN]: async () => this.#reply(int64(this.#values.queueLength(await this.#key()))),
    [Command.LIST_KEYS]: async () => {
      const names = this.#values.keys()
      this.#reply(Buffer.concat([int64(names.length), ...names.map(key)]))
    },
    [Command.BARRIER]: async () => {
      const [name, worldSize] = [await this.#key(), await this.#reader.int64()]
      this.#requireRoom(name, EMPTY)
      const arrived = this.#values.add(name, 1n)
      if (arrived === undefined) throw new ConnectionError(`${name} is not a number`)
      // Nobody else waits for this: it never gets a value.
      const complete = `barrier ${name}`
      if (arrived < worldSize) return this.#wait([complete])
      this.#values.wake(complete)
      this.#reply(uint8(STOP_WAITING))
    },
  }

  #key(): Promise<string> {
    return this.#reader.key(this.#server.limits.keyBytes)
  }

  #value(): Promise<Buffer> {
    return this.#reader.value(this.#server.limits.valueBytes)
  }

  async #keys(): Promise<string[]> {
    const count = await this.#reader.length(this.#server.limits.keys)
    const names: string[] = []
    for (let i = 0; i < count; i++) names.push(await this.#key())
    return names
  }

  #compareSet(name: string, expected: Buffer, desired: Buffer): Buffer {
    const current = this.#values.get(name)
    // As torch: a key without value is only set when nothing was expected.
    if (current === undefined && expected.length > 0) return expected
    if (current !== undefined && !current.equals(expected)) return current
    this.#requireRoom(name, desired)
    this.#values.set(name, desired)
    return desired
  }

  #wait(names: readonly string[]): void {
    let isOver = false
    const end = this.#values.whenPresent(names, () => {
      isOver = true
      this.#cancelWait = undefined
      this.#reply(uint8(STOP_WAITING))
    })
    if (!isOver) this.#cancelWait = end
  }

  #endWait(): void {
    this.#cancelWait?.()
    this.#cancelWait = undefined
  }

  /** @returns whether this was a message of the handshake */
  #shakeHands(name: string, content: Buffer): boolean {
    if (name === `${KEY_PREFIX}${HELLO}`) {
      if (content.length !== NONCE_BYTES) throw new ConnectionError('the nonce has another length')
      this.#transcript = { session: this.#server.session, hello: content, nonce: newNonce() }
      return true
    }
    if (name !== `${KEY_PREFIX}${ANSWER}`) return false
    if (this.#transcript === undefined || !verifyAnswer(this.#server.secret, this.#transcript, content)) {
      throw new ConnectionError('the token is not that of the launch')
    }
    this.#isProven = true
    this.#admit()
    return true
  }

  #isChallenge(name: string): boolean {
    return name === `${KEY_PREFIX}${CHALLENGE}`
  }

  #replyChallenge(): void {
    if (this.#transcript === undefined) throw new ConnectionError('a challenge needs a nonce')
    this.#reply(value(encodeChallenge(this.#server.secret, this.#transcript)))
  }

  #admit(): void {
    if (this.isAdmitted) clearTimeout(this.#timer)
  }

  #requireRoom(name: string, content: Buffer): void {
    if (this.#values.byteLength + name.length + content.length > this.#server.limits.totalBytes) {
      throw new ConnectionError('the store is full')
    }
  }

  #reply(bytes: Buffer): void {
    if (this.#socket.writable) this.#socket.write(bytes)
  }

  #drained(): Promise<void> {
    return new Promise((resolve) => {
      const settle = () => {
        this.#socket.off('drain', settle).off('close', settle)
        resolve()
      }
      this.#socket.on('drain', settle).on('close', settle)
      if (this.#socket.destroyed) settle()
    })
  }
}

function refused(command: number): ConnectionError {
  return new ConnectionError(`command ${command} is refused`)
}

import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { type AddressInfo, createConnection, createServer, type Server, type Socket } from 'node:net'
import { setTimeout as delay } from 'node:timers/promises'
import { RankwiseError } from '@rankwise/core'
import {
  ByteReader,
  CHALLENGE_BYTES,
  ConnectionError,
  encodeAnswer,
  encodeChallenge,
  NONCE_BYTES,
  newNonce,
  PROOF_BYTES,
  SESSION_BYTES,
  type Secret,
  verifyAnswer,
  verifyChallenge,
} from '@rankwise/core/collectives'

/** Where a rank takes connections of higher ranks. */
export interface PeerAddress {
  readonly rank: number
  readonly address: string
  readonly port: number
  /** See {@link PeerSockets.nonce}. */
  readonly nonce: string
}

/** Who may connect: ranks of this group. */
export interface PeerIdentity {
  readonly rank: number
  /** Secret of the launch. */
  readonly token: string
}

/** What becomes of connections. */
export interface PeerListener {
  /** A rank has connected, or was reached. */
  onSocket(rank: number, channel: number, socket: Socket): void
  /** A rank will never be reached. */
  onUnreachable(rank: number, where: string, why: string): void
}

/** A rank answers in milliseconds, or seconds where it holds its event loop; whoever says nothing for so long is none. */
const HANDSHAKE_MS = 5_000
/** Connections that have not yet proven anything; a new one ends the oldest, as in the store. */
const MAX_STRANGERS = 64
/** A rank that was ended as the oldest stranger comes back after this time. */
const RETRY_MS = 50

const MAGIC = 0x52_57_50_31
/** MAGIC, rank and channel, 32 bits each. */
const GREETING_BYTES = 12

/**
 * Connections between the ranks of a group: each rank listens, and dials all that are lower. Both sides prove that they
 * know the secret of the launch, as with the store, before anything else is read: the one that dials sends MAGIC, its
 * rank, a channel and a nonce, gets a challenge and sends the answer.
 */
export class PeerSockets {
  /** Goes into every proof, so that what was said to this rank is worth nothing elsewhere. */
  readonly nonce = randomBytes(16).toString('hex')
  readonly #identity: PeerIdentity
  readonly #server: Server
  readonly #session = randomBytes(SESSION_BYTES)
  readonly #strangers = new Set<Socket>()
  readonly #stop = new AbortController()
  #listener: PeerListener | undefined

  private constructor(identity: PeerIdentity, server: Server) {
    this.#identity = identity
    this.#server = server
    // One connection that cannot be taken, for want of descriptors, is a matter of the rank that waits for it.
    server.on('error', () => {})
    server.on('connection', (socket) => void this.#greet(socket))
    server.unref()
  }

  /** Listens at exactly `address`, on a port that the system chooses. @throws RankwiseError `RENDEZVOUS_ADDRESS` */
  static async listen(address: string, identity: PeerIdentity): Promise<PeerSockets> {
    const server = createServer()
    try {
      server.listen(0, address)
      await once(server, 'listening')
    } catch (cause) {
      throw new RankwiseError('RENDEZVOUS_ADDRESS', 'this rank cannot listen here', {
        where: address,
        actual: { rank: identity.rank, reason: (cause as NodeJS.ErrnoException).code },
        rule: 'a rank listens at the address from which it reaches MASTER_ADDR',
        cause,
      })
    }
    return new PeerSockets(identity, server)
  }

  /** Where the others reach this rank. */
  get place(): PeerAddress {
    const { address, port } = this.#server.address() as AddressInfo
    return { rank: this.#identity.rank, address, port, nonce: this.nonce }
  }

  /** From now on connections are handed out. */
  listen(listener: PeerListener): void {
    this.#listener = listener
  }

  /** Connects to a lower rank, once for each channel. */
  dial(peer: PeerAddress, channels: number): void {
    for (let channel = 0; channel < channels; channel++) void this.#dial(peer, channel)
  }

  /** Takes and makes no further connection; those that are handed out stay. */
  stop(): void {
    this.#stop.abort()
    this.#server.close()
    for (const socket of this.#strangers) socket.destroy()
  }

  async #greet(socket: Socket): Promise<void> {
    if (this.#stop.signal.aborted) return void socket.destroy()
    const [oldest] = this.#strangers
    if (this.#strangers.size >= MAX_STRANGERS) oldest?.destroy()
    await this.#asStranger(socket, async (reader) => {
      const greeting = await reader.bytes(GREETING_BYTES)
      const [magic, rank, channel] = [0, 4, 8].map((at) => greeting.readUInt32LE(at)) as [number, number, number]
      if (magic !== MAGIC || rank <= this.#identity.rank) throw new ConnectionError('not a rank')
      const secret = this.#secretFor(this.nonce, rank, channel)
      const hello = await reader.bytes(NONCE_BYTES)
      const transcript = { session: this.#session, hello, nonce: newNonce() }
      socket.write(encodeChallenge(secret, transcript))
      const answer = await reader.bytes(PROOF_BYTES)
      if (!verifyAnswer(secret, transcript, answer)) throw new ConnectionError('another token')
      return { rank, channel }
    })
  }

  async #dial({ rank, address, port, nonce }: PeerAddress, channel: number): Promise<void> {
    const where = `${address}:${port}`
    while (!this.#stop.signal.aborted) {
      const socket = createConnection({ port, host: address })
      let reached = false
      socket.once('connect', () => {
        reached = true
      })
      const why = await this.#asStranger(socket, async (reader) => {
        const secret = this.#secretFor(nonce, this.#identity.rank, channel)
        const hello = newNonce()
        socket.write(Buffer.concat([greetingOf(this.#identity.rank, channel), hello]))
        const transcript = verifyChallenge(secret, hello, await reader.bytes(CHALLENGE_BYTES))
        if (transcript === undefined) throw new ImpostorError('who answers does not know the token of this launch')
        socket.write(encodeAnswer(secret, transcript))
        return { rank, channel }
      })
      if (why === undefined || this.#stop.signal.aborted) return
      if (!reached || why instanceof ImpostorError) {
        this.#listener?.onUnreachable(rank, where, why.message)
        return
      }
      await delay(RETRY_MS)
    }
  }

  /** @returns why the connection came to nothing */
  async #asStranger(
    socket: Socket,
    shakeHands: (reader: ByteReader) => Promise<{ rank: number; channel: number }>,
  ): Promise<Error | undefined> {
    this.#strangers.add(socket)
    const timer = setTimeout(() => socket.destroy(), HANDSHAKE_MS).unref()
    let why: NodeJS.ErrnoException | undefined
    socket.on('error', (error) => {
      why = error
    })
    socket.setNoDelay(true)
    socket.unref()
    try {
      const reader = new ByteReader(socket)
      const { rank, channel } = await shakeHands(reader)
      reader.detach()
      if (this.#stop.signal.aborted) throw new ConnectionError('no more connections are taken')
      this.#listener?.onSocket(rank, channel, socket)
      return undefined
    } catch (error) {
      socket.destroy()
      if (!(error instanceof ConnectionError)) throw error
      return error instanceof ImpostorError ? error : new ConnectionError(why?.code ?? error.message)
    } finally {
      clearTimeout(timer)
      this.#strangers.delete(socket)
    }
  }

  /** What both sides of one connection know, and no other connection is worth. */
  #secretFor(nonce: string, rank: number, channel: number): Secret {
    return { token: this.#identity.token, scope: `peer ${nonce} ${rank} ${channel}` }
  }
}

/** Someone listens where a rank should, and there is no point in asking again. */
class ImpostorError extends ConnectionError {}

function greetingOf(rank: number, channel: number): Buffer {
  const greeting = Buffer.alloc(GREETING_BYTES)
  for (const [i, word] of [MAGIC, rank, channel].entries()) greeting.writeUInt32LE(word, i * 4)
  return greeting
}

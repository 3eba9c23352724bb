import { createHmac, randomBytes, timingSafeEqual } from 'node:crypto'
import { once } from 'node:events'
import { type AddressInfo, createConnection, createServer, type Server, type Socket } from 'node:net'
import { nameRanks } from '@rankwise/collectives-local/internals'
import { RankwiseError } from '@rankwise/core'
import { Connection, type Message } from './connection.ts'
import { endWhenUnacknowledged } from './end-when-unacknowledged.ts'
import type { Card } from './machines.ts'

/** Who may connect: ranks of this group. */
export interface MeshIdentity {
  readonly rank: number
  /** Secret of the launch. */
  readonly token: string
}

/** What a mesh tells its owner about the other ranks. */
export interface MeshListener {
  onMessage(rank: number, message: Message): void
  onLost(rank: number, why: string): void
}

/** A rank has its first message ready when it connects; whoever says nothing for so long is a stranger. */
const HELLO_MS = 5_000
/** A failure lists what every rank was at: about 100 bytes each. */
const MESSAGE_LIMIT = 256 * 2 ** 10
const HELLO_LIMIT = 4 * 2 ** 10

/**
 * How long the network may take to acknowledge: long against a retransmission (200 ms at first) and short enough to
 * name the lost ranks within 2 s, together with the 250 ms between two messages.
 */
const UNACKNOWLEDGED_MS = 1_200

/**
 * Connections between all ranks, beside MPI. They carry no data: they tell at once which rank is gone, which MPI does
 * not, and pass on why a rank gave up.
 */
export class Mesh {
  /** Makes what a rank says to join worth nothing anywhere else. */
  readonly nonce = randomBytes(16).toString('hex')
  readonly #identity: MeshIdentity
  readonly #server: Server
  readonly #links = new Map<number, Connection>()
  readonly #strangers = new Set<Socket>()
  #listener: MeshListener | undefined
  #expected = 0
  #complete: () => void = () => {}
  #broken: (error: Error) => void = () => {}
  #early: [number, Message][] = []

  private constructor(identity: MeshIdentity, server: Server) {
    this.#identity = identity
    this.#server = server
    // One connection that cannot be taken, for want of descriptors, is a matter of the rank that waits for it.
    server.on('error', () => {})
    server.on('connection', (socket) => this.#greet(socket))
    server.unref()
  }

  /** Listens at `address`, on a port that the system chooses. @throws RankwiseError `RENDEZVOUS_ADDRESS` */
  static async listen(address: string, identity: MeshIdentity): Promise<Mesh> {
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
    return new Mesh(identity, server)
  }

  get address(): string {
    return (this.#server.address() as AddressInfo).address
  }

  get port(): number {
    return (this.#server.address() as AddressInfo).port
  }

  /**
   * Connects all ranks: each to all that are lower. No further connection is taken afterwards.
   *
   * @throws RankwiseError `RENDEZVOUS_TIMEOUT`, `RANK_LOST`
   */
  async connect(cards: readonly Card[], signal: AbortSignal): Promise<void> {
    const { rank } = this.#identity
    this.#expected = cards.length - 1
    const complete = new Promise<void>((resolve, reject) => {
      this.#complete = resolve
      this.#broken = reject
    })
    const onTimeout = () => this.#broken(this.#incomplete(cards.length, signal.reason))
    signal.addEventListener('abort', onTimeout)
    try {
      for (const card of cards.slice(0, rank)) this.#dial(card)
      this.#check()
      if (signal.aborted) onTimeout()
      await complete
    } finally {
      signal.removeEventListener('abort', onTimeout)
      this.#server.close()
      for (const socket of this.#strangers) socket.destroy()
    }
  }

  /** From now on the owner hears of everything, also of what has come already. */
  listen(listener: MeshListener): void {
    this.#listener = listener
    for (const [rank, message] of this.#early.splice(0)) listener.onMessage(rank, message)
  }

  broadcast(message: Message): void {
    for (const link of this.#links.values()) link.send(message)
  }

  /** Ends all connections; peers hear of it as of a lost rank, unless they have been told. */
  close(): void {
    this.#server.close()
    for (const socket of this.#strangers) socket.destroy()
    for (const link of this.#links.values()) link.close()
    this.#links.clear()
  }

  #greet(socket: Socket): void {
    this.#strangers.add(socket)
    const link = new Connection(socket, HELLO_LIMIT)
    const timer = setTimeout(() => socket.destroy(), HELLO_MS).unref()
    const settle = () => {
      clearTimeout(timer)
      this.#strangers.delete(socket)
    }
    link.onEnd = settle
    link.onMessage = (message) => {
      const rank = this.#rankOf(message)
      if (rank === undefined) return socket.destroy()
      settle()
      link.send({ welcome: this.#proof('welcome', rank, this.nonce) })
      this.#adopt(rank, link, socket)
    }
  }

  /** The rank that says hello, if it is one that may connect and has not yet. */
  #rankOf({ hello, proof }: Message): number | undefined {
    const rank = Number(hello)
    const awaited = Number.isInteger(hello) && rank > this.#identity.rank && !this.#links.has(rank)
    return awaited && isEqual(proof, this.#proof('hello', rank, this.nonce)) ? rank : undefined
  }

  /** What only those can say who know the token, and only to this one. */
  #proof(word: string, rank: number, nonce: string): string {
    return createHmac('sha256', this.#identity.token).update(`${word} ${rank} ${nonce}`).digest('hex')
  }

  #dial({ rank, address, port, nonce }: Card): void {
    const socket = createConnection(port, address)
    const link = new Connection(socket, MESSAGE_LIMIT)
    const { rank: own } = this.#identity
    link.send({ hello: own, proof: this.#proof('hello', own, nonce) })
    link.onEnd = (why) => this.#broken(unreachable(rank, `${address}:${port}`, why))
    link.onMessage = ({ welcome }) => {
      if (isEqual(welcome, this.#proof('welcome', own, nonce))) this.#adopt(rank, link, socket)
      else socket.destroy()
    }
  }

  #adopt(rank: number, link: Connection, socket: Socket): void {
    endWhenUnacknowledged(socket, UNACKNOWLEDGED_MS)
    link.limit = MESSAGE_LIMIT
    this.#links.set(rank, link)
    link.onMessage = (message) => this.#receive(rank, message)
    link.onEnd = (why) => {
      this.#links.delete(rank)
      this.#broken(lost(rank))
      this.#listener?.onLost(rank, why)
    }
    this.#check()
  }

  #receive(rank: number, message: Message): void {
    if (this.#listener === undefined) this.#early.push([rank, message])
    else this.#listener.onMessage(rank, message)
  }

  #check(): void {
    if (this.#links.size === this.#expected) this.#complete()
  }

  #incomplete(worldSize: number, cause: unknown): RankwiseError {
    const missing = Array.from({ length: worldSize }, (_, rank) => rank).filter(
      (rank) => rank !== this.#identity.rank && !this.#links.has(rank),
    )
    return new RankwiseError('RENDEZVOUS_TIMEOUT', `${nameRanks(missing)} did not connect in time`, {
      where: 'rendezvous',
      actual: { rank: this.#identity.rank, worldSize, ranks: missing },
      rule: 'every rank reaches every other one over TCP',
      remedy: 'check that no firewall stands between the machines',
      cause,
    })
  }
}

/** Compares in a time that does not tell how much was right. */
function isEqual(said: unknown, proof: string): boolean {
  const [a, b] = [Buffer.from(String(said)), Buffer.from(proof)]
  return a.length === b.length && timingSafeEqual(a, b)
}

function unreachable(rank: number, where: string, why: string): RankwiseError {
  return new RankwiseError('RANK_LOST', `rank ${rank} cannot be reached`, {
    where,
    actual: { ranks: [rank], reason: why },
    rule: 'every rank reaches every other one over TCP',
    remedy:
      'look at the output of this rank for the first error, and check that no firewall stands between the machines',
  })
}

function lost(rank: number): RankwiseError {
  return new RankwiseError('RANK_LOST', `rank ${rank} was lost before the group was complete`, {
    where: 'rendezvous',
    actual: { ranks: [rank] },
    remedy: 'look at the output of the lost rank for the first error',
  })
}

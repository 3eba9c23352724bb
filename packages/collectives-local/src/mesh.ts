import type { Socket } from 'node:net'
import { RankwiseError } from '@rankwise/core'
import { type Failure, failureError, nameRanks } from '@rankwise/core/collectives'
import { Connection, type Message } from './connection.ts'
import { type PeerAddress, type PeerIdentity, PeerSockets } from './peer-sockets.ts'

export type { PeerAddress } from './peer-sockets.ts'

/** What a mesh tells its owner about the other ranks. */
export interface MeshListener {
  onMessage(rank: number, message: Message): void
  onLost(rank: number, why: string): void
}

/** How the ranks are connected. */
export interface MeshOptions extends PeerIdentity {
  /** Whether ranks get a second connection each, for data. @default false */
  readonly data?: boolean
  /** Called with every connection for messages. */
  readonly prepare?: (socket: Socket) => void
}

/** A failure lists what every rank was at: about 100 bytes each. */
const MESSAGE_LIMIT = 256 * 2 ** 10

const MESSAGES = 0
const DATA = 1

/**
 * Connections between all ranks for short messages: they tell at once which rank is gone, and pass on why a rank gave up.
 * Data goes elsewhere, so that it never holds up a message.
 */
export class Mesh {
  readonly #rank: number
  readonly #sockets: PeerSockets
  readonly #channels: number
  readonly #prepare: (socket: Socket) => void
  readonly #links = new Map<number, Connection>()
  readonly #data = new Map<number, Socket>()
  #listener: MeshListener | undefined
  #expected = 0
  #complete: () => void = () => {}
  #broken: (error: Error) => void = () => {}
  #early: [number, Message][] = []

  private constructor({ rank, data = false, prepare = () => {} }: MeshOptions, sockets: PeerSockets) {
    this.#rank = rank
    this.#sockets = sockets
    this.#channels = data ? 2 : 1
    this.#prepare = prepare
    sockets.listen({
      onSocket: (peer, channel, socket) => this.#adopt(peer, channel, socket),
      onUnreachable: (peer, where, why) => this.#broken(unreachable(peer, where, why)),
    })
  }

  /** Listens at `address`, on a port that the system chooses. @throws RankwiseError `RENDEZVOUS_ADDRESS` */
  static async listen(address: string, options: MeshOptions): Promise<Mesh> {
    const { rank, token } = options
    return new Mesh(options, await PeerSockets.listen(address, { rank, token }))
  }

  /** Where the others reach this rank. */
  get place(): PeerAddress {
    return this.#sockets.place
  }

  /** The connections for data, by rank. */
  get data(): ReadonlyMap<number, Socket> {
    return this.#data
  }

  /**
   * Connects all ranks: each to all that are lower. No further connection is taken afterwards.
   *
   * @param peers all ranks, this one included, in rank order
   * @throws RankwiseError `RENDEZVOUS_TIMEOUT`, `RANK_LOST`
   */
  async connect(peers: readonly PeerAddress[], signal: AbortSignal): Promise<void> {
    this.#expected = peers.length - 1
    const complete = new Promise<void>((resolve, reject) => {
      this.#complete = resolve
      this.#broken = reject
    })
    const onTimeout = () => this.#broken(this.#incomplete(peers.length, signal.reason))
    signal.addEventListener('abort', onTimeout)
    try {
      for (const peer of peers.slice(0, this.#rank)) this.#sockets.dial(peer, this.#channels)
      this.#check()
      if (signal.aborted) onTimeout()
      await complete
    } catch (error) {
      for (const socket of this.#data.values()) socket.destroy()
      throw error
    } finally {
      signal.removeEventListener('abort', onTimeout)
      this.#sockets.stop()
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

  /** Ends the connections for messages; peers hear of it as of a lost rank, unless they have been told. */
  async close(): Promise<void> {
    this.#sockets.stop()
    const links = [...this.#links.values()]
    this.#links.clear()
    await Promise.all(links.map((link) => link.close()))
  }

  #adopt(rank: number, channel: number, socket: Socket): void {
    if (channel === DATA && this.#channels === 2 && !this.#data.has(rank)) this.#data.set(rank, socket)
    else if (channel === MESSAGES && !this.#links.has(rank)) this.#link(rank, socket)
    else socket.destroy()
    this.#check()
  }

  #link(rank: number, socket: Socket): void {
    this.#prepare(socket)
    const link = new Connection(socket, MESSAGE_LIMIT)
    this.#links.set(rank, link)
    link.onMessage = (message) => this.#receive(rank, message)
    link.onEnd = (why) => {
      this.#links.delete(rank)
      this.#broken(this.#loss(rank))
      this.#listener?.onLost(rank, why)
    }
  }

  #receive(rank: number, message: Message): void {
    if (this.#listener === undefined) this.#early.push([rank, message])
    else this.#listener.onMessage(rank, message)
  }

  /** A rank that gave up because of what all ranks know may be gone before this one has found all others. */
  #loss(rank: number): RankwiseError {
    const said = this.#early.find(([from, { failure }]) => from === rank && failure !== undefined)
    return said === undefined ? lostEarly(rank) : failureError(said[1].failure as Failure, 'rendezvous')
  }

  #check(): void {
    if (this.#links.size === this.#expected && this.#data.size === this.#expected * (this.#channels - 1)) {
      this.#complete()
    }
  }

  #incomplete(worldSize: number, cause: unknown): RankwiseError {
    const missing = Array.from({ length: worldSize }, (_, rank) => rank).filter(
      (rank) => rank !== this.#rank && !(this.#links.has(rank) && (this.#channels === 1 || this.#data.has(rank))),
    )
    return new RankwiseError('RENDEZVOUS_TIMEOUT', `${nameRanks(missing)} did not connect in time`, {
      where: 'rendezvous',
      actual: { rank: this.#rank, worldSize, ranks: missing },
      rule: 'every rank reaches every other one over TCP',
      remedy: 'check that no firewall stands between the ranks',
      cause,
    })
  }
}

function unreachable(rank: number, where: string, why: string): RankwiseError {
  return new RankwiseError('RANK_LOST', `rank ${rank} cannot be reached`, {
    where,
    actual: { ranks: [rank], reason: why },
    rule: 'every rank reaches every other one over TCP',
    remedy: 'look at the output of this rank for the first error, and check that no firewall stands between the ranks',
  })
}

function lostEarly(rank: number): RankwiseError {
  return new RankwiseError('RANK_LOST', `rank ${rank} was lost before the group was complete`, {
    where: 'rendezvous',
    actual: { ranks: [rank] },
    remedy: 'look at the output of the lost rank for the first error',
  })
}

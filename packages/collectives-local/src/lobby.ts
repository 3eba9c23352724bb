import { createHash, timingSafeEqual } from 'node:crypto'
import type { Socket } from 'node:net'
import { type EnvironmentRendezvous, RankwiseError } from '@rankwise/core'
import { nameRanks } from './failure.ts'
import type { Member } from './failure-detector.ts'
import { ConnectionError, errorMessage, fieldsOf, receive, rethrowErrorMessage, send } from './message.ts'
import { processState } from './process-state.ts'

/** What a rank says first. */
export interface Hello extends Member {
  readonly rankwise: 1
  readonly worldSize: number
  readonly token: string
}

/** A rank has its first message ready when it connects; whoever says nothing for so long is a stranger. */
const HELLO_MS = 5_000
const MESSAGE_LIMIT = 1_024

interface Seat {
  readonly member: Member
  readonly socket: Socket
  /** Settles when the rank has opened the arena, or is lost. */
  readonly ready: Promise<unknown>
}

/** Where rank 0 gathers the other ranks. Connections that do not present the token of the launch change nothing. */
export class Lobby {
  readonly #worldSize: number
  readonly #token: string
  readonly #self: Member
  readonly #signal: AbortSignal
  readonly #sockets = new Set<Socket>()
  readonly #seats = new Map<number, Seat>()
  readonly #refusals: string[] = []
  readonly #complete: Promise<void>
  #resolve: () => void = () => {}
  #reject: (error: unknown) => void = () => {}
  readonly #onTimeout = () => this.#reject(this.#incomplete())

  /** @param signal ends the wait for ranks */
  constructor({ worldSize, token = '' }: EnvironmentRendezvous, self: Member, signal: AbortSignal) {
    this.#worldSize = worldSize
    this.#token = token
    this.#self = self
    this.#signal = signal
    this.#complete = new Promise((resolve, reject) => {
      this.#resolve = resolve
      this.#reject = reject
    })
    // Whoever awaits members() gets the rejection; before that, it must not end the process.
    this.#complete.catch(() => {})
    signal.addEventListener('abort', this.#onTimeout)
  }

  /** Takes a new connection: a rank gets its seat, a stranger is cut off. */
  async greet(socket: Socket): Promise<void> {
    this.#sockets.add(socket)
    socket.on('error', () => {})
    socket.on('close', () => this.#sockets.delete(socket))
    try {
      const hello = parseHello(await receive(socket, MESSAGE_LIMIT, AbortSignal.timeout(HELLO_MS)))
      if (hello !== undefined && sameSecret(hello.token, this.#token)) this.#admit(hello, socket)
      else socket.destroy()
    } catch {
      socket.destroy()
    }
  }

  /**
   * Resolves with all members, in rank order, once every rank has its seat.
   *
   * @throws RankwiseError `RENDEZVOUS_TIMEOUT`, or `RANK_LOST` when a rank that had a seat is gone
   */
  async members(): Promise<Member[]> {
    await this.#complete
    return [this.#self, ...[...this.#seats.values()].map(({ member }) => member)].sort((a, b) => a.rank - b.rank)
  }

  /** Sends a message to every rank that has a seat. */
  broadcast(message: unknown): void {
    for (const { socket } of this.#seats.values()) send(socket, message)
  }

  /** Resolves once every rank has said that it is ready. */
  async allReady(): Promise<void> {
    for (const { ready } of this.#seats.values()) rethrowErrorMessage(await ready, 'rendezvous')
  }

  /** Closes all connections, after what is still to be sent. */
  close(): void {
    this.#signal.removeEventListener('abort', this.#onTimeout)
    for (const socket of this.#sockets) socket.destroySoon()
  }

  #admit(hello: Hello, socket: Socket): void {
    const refusal = this.#refusal(hello)
    if (refusal !== undefined) {
      this.#refusals.push(refusal.message)
      send(socket, errorMessage(refusal))
      socket.destroySoon()
      return
    }
    const { rank, pid, startTime } = hello
    const ready = receive(socket, MESSAGE_LIMIT, this.#signal).catch((error) => {
      throw error instanceof ConnectionError ? lost(rank) : this.#incomplete()
    })
    ready.catch(this.#reject)
    this.#seats.set(rank, { member: { rank, pid, startTime }, socket, ready })
    if (this.#seats.size === this.#worldSize - 1) this.#resolve()
  }

  #refusal({ rank, worldSize, pid, startTime }: Hello): RankwiseError | undefined {
    if (worldSize !== this.#worldSize) {
      return refused(rank, 'has another world size than rank 0', {
        WORLD_SIZE: worldSize,
        'on rank 0': this.#worldSize,
      })
    }
    if (this.#seats.has(rank) || rank === 0) return refused(rank, 'has already joined the group', { RANK: rank })
    if (processState(pid)?.startTime === startTime) return undefined
    return new RankwiseError('TRANSPORT_UNSUPPORTED', `rank ${rank} runs in another pid namespace than rank 0`, {
      where: 'rendezvous',
      actual: { pid },
      rule: "ranks of 'local' collectives see each other in /proc",
      remedy: 'start all ranks inside one container',
    })
  }

  #incomplete(): RankwiseError {
    const ranks = Array.from({ length: this.#worldSize }, (_, rank) => rank)
    const missing = ranks.filter((rank) => rank !== 0 && !this.#seats.has(rank))
    const what =
      missing.length > 0 ? `${nameRanks(missing)} did not join the group in time` : 'a rank did not get ready'
    return new RankwiseError('RENDEZVOUS_TIMEOUT', what, {
      where: 'rendezvous',
      actual: { worldSize: this.#worldSize, joined: this.#seats.size + 1, refused: this.#refusals },
      rule: 'every rank joins within timeoutMs',
      remedy:
        'check that every rank was started, with the same WORLD_SIZE, MASTER_ADDR, MASTER_PORT and RANKWISE_TOKEN',
    })
  }
}

function parseHello(message: unknown): Hello | undefined {
  const { rankwise, rank, worldSize, token, pid, startTime } = fieldsOf(message)
  const isHello =
    rankwise === 1 &&
    Number.isInteger(rank) &&
    Number.isInteger(worldSize) &&
    Number.isInteger(pid) &&
    typeof token === 'string' &&
    typeof startTime === 'string' &&
    Number(rank) >= 0 &&
    Number(rank) < Number(worldSize)
  return isHello ? (message as Hello) : undefined
}

/** Compares in a time that does not tell how much of the secret was right. */
function sameSecret(a: string, b: string): boolean {
  const digest = (text: string) => createHash('sha256').update(text).digest()
  return timingSafeEqual(digest(a), digest(b))
}

function lost(rank: number): RankwiseError {
  return new RankwiseError('RANK_LOST', `rank ${rank} was lost before the group was complete`, {
    where: 'rendezvous',
    actual: { ranks: [rank] },
    remedy: 'look at the output of the lost rank for the first error',
  })
}

function refused(rank: number, why: string, actual: Readonly<Record<string, unknown>>): RankwiseError {
  return new RankwiseError('RENDEZVOUS_REFUSED', `rank ${rank} ${why}`, {
    where: 'rendezvous',
    actual,
    rule: 'every rank of a group has its own RANK and the same WORLD_SIZE',
  })
}

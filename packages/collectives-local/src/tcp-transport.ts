import { setImmediate } from 'node:timers/promises'
import type { RankwiseError } from '@rankwise/core'
import type { Failure, Operation } from '@rankwise/core/collectives'
import { DataLinks } from './data-links.ts'
import { GroupState } from './group-state.ts'
import type { Reduce } from './kernel.ts'
import { Mesh, type PeerAddress } from './mesh.ts'
import { firstFailure, type Note, openTogether, tell } from './open-together.ts'
import { newMemory, PrivateAllocations } from './private-allocations.ts'
import { TcpExchange } from './tcp-exchange.ts'
import { labelOf, type TensorMemory, type Transport } from './transport.ts'
import type { Turn } from './turn.ts'

/** Ranks of one machine reach each other here, and nobody from outside does. */
export const LOOPBACK = '127.0.0.1'

/** What a group is made of, beside its connections. */
export interface TcpGroup {
  readonly rank: number
  /** Processes of all ranks, in rank order. */
  readonly pids: readonly number[]
  /** What ranks of the group know, and nobody else. */
  readonly token: string
  readonly reduce: Reduce
  /** Bytes that are received of a rank at a time, to be reduced. */
  readonly chunkBytes: number
  readonly timeoutMs: number
  /** How messages tell the group from others; empty for the first one. */
  readonly label: string
}

/** What the operations of a rank fail with after it has left. */
const LEFT: Failure = {
  code: 'COLLECTIVES_DESTROYED',
  what: 'this rank has left the group',
  ranks: [],
  rule: 'no operation after destroy',
}

/** Ranks that are connected over the loopback: every two by one connection for messages and one for data. */
export class TcpTransport implements Transport {
  readonly name = 'tcp'
  readonly exchange: TcpExchange
  readonly allocations = new PrivateAllocations()
  readonly #group: TcpGroup
  readonly #state: GroupState
  readonly #links: DataLinks
  #completed = 0

  /** Takes over the connections. @param mesh of all ranks, with data */
  constructor(group: TcpGroup, mesh: Mesh) {
    const { rank, pids, timeoutMs, label, reduce, chunkBytes } = group
    this.#group = group
    this.#links = new DataLinks(rank, mesh.data)
    this.exchange = new TcpExchange(this.#links, rank, reduce, chunkBytes)
    this.#state = new GroupState(mesh, {
      rank,
      worldSize: pids.length,
      timeoutMs,
      label,
      describe: (peer) => `rank ${peer} (process ${pids[peer]})`,
      medium: 'the loopback',
    })
    for (const { rank: peer, link } of this.#links.peers) link.onEnd = () => this.#state.connectionEnded(peer)
    this.#state.onFailure = ({ what }) => {
      this.#links.interrupt(new Error(what))
      this.#links.destroy()
    }
    this.#state.listen()
  }

  get worldSize(): number {
    return this.#group.pids.length
  }

  /** Resolves when every rank is connected to all others. @throws RankwiseError what a rank failed with */
  async ready(signal: AbortSignal): Promise<void> {
    const onTimeout = () => this.#state.notReady()
    signal.addEventListener('abort', onTimeout)
    try {
      if (signal.aborted) onTimeout()
      await this.#state.ready()
    } finally {
      signal.removeEventListener('abort', onTimeout)
    }
  }

  run<T>(operation: Operation, signal: AbortSignal | undefined, body: (turn: Turn) => Promise<T> | T): Promise<T> {
    return this.#state.run(operation, signal, async () => {
      this.#links.begin(operation, (failure) => this.#end(failure))
      const result = await body({ operation, signal, deadline: undefined })
      await this.#links.verified
      await this.#links.sent()
      // A rank that comes late finds what the others have sent, and that they have given up since: both have arrived by
      // now, and the event loop hands out all of it before it comes to this.
      await setImmediate()
      this.#state.requireRunning()
      this.#completed = operation.sequence
      return result
    })
  }

  fail(failure: Failure): void {
    this.#state.fail(failure)
  }

  leave(): void {
    this.#state.leave(this.#completed, LEFT)
    this.#links.interrupt(new Error(LEFT.what))
  }

  async close(): Promise<void> {
    this.allocations.releaseAll()
    await Promise.all([this.#links.close(), this.#state.close()])
  }

  async allocate(turn: Turn, byteLength: number): Promise<TensorMemory | RankwiseError> {
    const memory = await openTogether(this.exchange, turn, this.#place, {
      owner: 0,
      create: () => newMemory(byteLength),
      locate: () => ({}),
      open: () => newMemory(byteLength),
      free: () => {},
    })
    return memory instanceof ArrayBuffer ? this.allocations.add(memory) : (memory as RankwiseError)
  }

  async split(turn: Turn, members: readonly number[]): Promise<TcpTransport | RankwiseError | undefined> {
    const rank = members.indexOf(this.#group.rank)
    const { timeoutMs, token, pids, label } = this.#group
    let mesh: Mesh | undefined
    try {
      const listened = await this.#tell(turn, async () => {
        if (rank < 0) return {}
        mesh = await Mesh.listen(LOOPBACK, { rank, token, data: true })
        return { location: mesh.place }
      })
      const peers = members.map((member) => listened[member]?.location as PeerAddress)
      const connected = await this.#tell(turn, async () => {
        if (mesh === undefined || peers.some((peer) => peer === undefined)) return {}
        await mesh.connect(peers, AbortSignal.timeout(timeoutMs))
        return {}
      })
      const failure = firstFailure([...listened, ...connected], this.worldSize)
      if (failure !== undefined) {
        await mesh?.close()
        return failure
      }
      if (mesh === undefined) return undefined
      const group = { ...this.#group, rank, pids: members.map((member) => pids[member] as number) }
      return new TcpTransport({ ...group, label: labelOf(label, members) }, mesh)
    } catch (error) {
      await mesh?.close()
      throw error
    }
  }

  /** Does something and tells the others what came of it. */
  async #tell(turn: Turn, work: () => Promise<Note<PeerAddress>>): Promise<readonly Note<PeerAddress>[]> {
    const note = await work().catch(
      ({ code = 'RANK_LOST', message }): Note<PeerAddress> => ({ error: { code, message } }),
    )
    return tell(this.exchange, turn, this.worldSize, note)
  }

  #end(failure: Failure): never {
    this.#state.fail(failure)
    throw new Error(failure.what)
  }

  get #place(): { readonly rank: number; readonly worldSize: number } {
    return { rank: this.#group.rank, worldSize: this.worldSize }
  }
}

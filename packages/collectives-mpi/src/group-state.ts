import {
  describeOperation,
  type Failure,
  failureError,
  nameRanks,
  type Operation,
} from '@rankwise/collectives-local/internals'
import { RankwiseError } from '@rankwise/core'
import type { Message } from './connection.ts'
import type { Machines } from './machines.ts'
import type { Mesh, MeshListener } from './mesh.ts'

/** How often ranks tell each other which operation they are at. */
const BEAT_MS = 250
/** A rank that says nothing for so long is stopped, or holds its event loop. */
const SILENT_MS = 3 * BEAT_MS
/** Ranks that are lost within this time, as all of one machine are, are named together. */
const COLLECT_MS = 50
/** How long a rank waits for word from the others about what has ended an operation on its machine. */
const WORD_MS = 1_000

interface Peer {
  /** Number of the operation that it is at, as it last said. */
  at: number
  heard: number
  ready: boolean
  /** Number of the last operation that it has completed before it left; undefined while it takes part. */
  left: number | undefined
  lost: string | undefined
}

/**
 * What this rank knows of the others, and why the group cannot go on when it cannot. Each rank finds out by itself and
 * tells all others; only the first failure counts.
 */
export class GroupState implements MeshListener {
  /** Called once, with the first failure. */
  onFailure: (failure: Failure) => void = () => {}
  readonly #mesh: Mesh
  readonly #machines: Machines
  readonly #rank: number
  readonly #timeoutMs: number
  readonly #peers = new Map<number, Peer>()
  readonly #beat: NodeJS.Timeout
  readonly #waiting = new Set<() => void>()
  /** What leaders have told for MPI, by rank and round. */
  readonly #words = new Map<string, readonly (readonly [string, string])[]>()
  #collecting: NodeJS.Timeout | undefined
  #current: Operation | undefined
  #at = 0
  #failure: Failure | undefined
  #closed = false

  constructor(mesh: Mesh, machines: Machines, rank: number, timeoutMs: number) {
    this.#mesh = mesh
    this.#machines = machines
    this.#rank = rank
    this.#timeoutMs = timeoutMs
    const heard = performance.now()
    for (let peer = 0; peer < machines.worldSize; peer++) {
      if (peer !== rank) this.#peers.set(peer, { at: 0, heard, ready: false, left: undefined, lost: undefined })
    }
    this.#beat = setInterval(() => mesh.broadcast({ at: this.#at }), BEAT_MS).unref()
    mesh.listen(this)
  }

  get failure(): Failure | undefined {
    return this.#failure
  }

  /** Ends the group on all ranks. @param verdict what the others report, if it is not the failure itself */
  fail(failure: Failure, verdict: Failure = failure): void {
    if (this.#failure !== undefined || this.#closed) return
    this.#failure = failure
    const { code, what, ranks, actual, rule, remedy } = verdict
    this.#mesh.broadcast({ failure: { code, what, ranks, actual, rule, remedy } })
    this.#settle()
    this.onFailure(failure)
  }

  /** MPI may end because a rank is lost, which the connections tell a little later. */
  mpiFailed(error: RankwiseError): void {
    setTimeout(() => {
      const [what = ''] = error.message.split('\n')
      const { code, rule, remedy } = error
      const failure = { code, what: `MPI failed on rank ${this.#rank}: ${what.replace(`[${code}] `, '')}` }
      this.fail({ ...failure, ranks: [this.#rank], cause: error, ...(rule && { rule }), ...(remedy && { remedy }) })
    }, WORD_MS).unref()
  }

  /** Resolves when all ranks are ready. @throws RankwiseError what a rank failed with, `RENDEZVOUS_TIMEOUT` */
  async ready(): Promise<void> {
    this.#mesh.broadcast({ ready: true })
    await this.#until(() => [...this.#peers.values()].every(({ ready }) => ready))
    if (this.#failure !== undefined) throw failureError(this.#failure, 'rendezvous')
  }

  /** The time to get {@link ready} is over. */
  notReady(): void {
    const late = this.#ranks(({ ready }) => !ready)
    const ranks = late.length > 0 ? late : [this.#rank]
    this.fail({
      code: 'RENDEZVOUS_TIMEOUT',
      what: `${nameRanks(ranks)} did not get ready in time`,
      ranks,
      actual: { timeoutMs: this.#timeoutMs },
      rule: 'every rank joins its machine and MPI within timeoutMs',
    })
  }

  /**
   * What the leaders tell each other in `round`; resolves when all have spoken, and never once the group has failed:
   * MPI, which asks, would end the process over an incomplete answer.
   */
  async exchange(round: number, words: readonly (readonly [string, string])[]): Promise<Map<string, string>> {
    this.#mesh.broadcast({ round, words })
    const leaders = this.#machines.ranks.map(([leader]) => leader as number)
    const others = leaders.filter((leader) => leader !== this.#rank)
    const known = () => others.map((leader) => this.#words.get(`${leader}/${round}`))
    await new Promise<void>((resolve) => {
      const look = () => {
        if (known().includes(undefined)) return
        this.#waiting.delete(look)
        resolve()
      }
      this.#waiting.add(look)
      look()
    })
    return new Map([...words, ...known().flatMap((entries) => entries ?? [])])
  }

  /** Runs one operation on this rank. @throws RankwiseError what ended the group */
  async run<T>(operation: Operation, signal: AbortSignal | undefined, body: () => Promise<T>): Promise<T> {
    const onAbort = () => this.#aborted(operation, signal?.reason)
    const timer = setTimeout(() => this.fail(this.#overdue(operation)), this.#timeoutMs)
    this.#current = operation
    this.#at = operation.sequence
    signal?.addEventListener('abort', onAbort)
    try {
      if (signal?.aborted === true) onAbort()
      this.#lookForLeavers()
      this.requireRunning()
      const result = await body()
      this.requireRunning()
      return result
    } catch (error) {
      throw failureError(await this.#reason(error), describeOperation(operation))
    } finally {
      clearTimeout(timer)
      signal?.removeEventListener('abort', onAbort)
      this.#current = undefined
    }
  }

  /** @throws Error when the group has ended; {@link run} puts the reason in its place */
  requireRunning(): void {
    if (this.#failure !== undefined) throw new GroupEnded()
  }

  /** Says that this rank takes part in nothing after operation `completed`. */
  leave(completed: number, failure: Failure): void {
    if (this.#closed) return
    this.#closed = true
    if (this.#failure !== undefined) return
    this.#mesh.broadcast({ left: completed })
    this.#failure = failure
    this.#settle()
  }

  /**
   * Resolves when every other rank has left, or one is lost, or `timeoutMs` are over.
   *
   * @returns whether all have left
   */
  async allLeft(): Promise<boolean> {
    const peers = [...this.#peers.values()]
    await this.#until(
      () => peers.every(({ left }) => left !== undefined) || peers.some(({ lost }) => lost !== undefined),
      AbortSignal.timeout(this.#timeoutMs),
    )
    return peers.every(({ left }) => left !== undefined)
  }

  /** Ends all connections. */
  close(): void {
    this.#closed = true
    clearInterval(this.#beat)
    clearTimeout(this.#collecting)
    this.#mesh.close()
  }

  onMessage(rank: number, message: Message): void {
    const peer = this.#peers.get(rank) as Peer
    peer.heard = performance.now()
    if (typeof message.at === 'number') peer.at = message.at
    if (message.ready === true) peer.ready = true
    if (Array.isArray(message.words)) this.#words.set(`${rank}/${message.round}`, message.words)
    if (typeof message.left === 'number') peer.left = message.left
    if (message.failure !== undefined) {
      // Whoever failed takes part in nothing any more, and does not wait for others to leave.
      peer.lost ??= 'failed'
      this.fail(message.failure as Failure)
    }
    this.#lookForLeavers()
    this.#settle()
  }

  onLost(rank: number, why: string): void {
    const peer = this.#peers.get(rank) as Peer
    if (peer.left === undefined) peer.lost ??= why
    this.#settle()
    if (peer.left !== undefined || this.#closed) return
    this.#collecting ??= setTimeout(() => this.fail(this.#lost()), COLLECT_MS).unref()
  }

  /** Whoever has left after an earlier operation will not come to this one. */
  #lookForLeavers(): void {
    const sequence = this.#current?.sequence
    if (sequence === undefined) return
    const left = this.#ranks((peer) => peer.left !== undefined && peer.left < sequence)
    if (left.length > 0) this.fail(lostRanks(left, `${nameRanks(left)} left the group`))
  }

  #lost(): Failure {
    const ranks = this.#ranks(({ lost }) => lost !== undefined)
    const names = ranks.map((rank) => this.#machines.describe(rank)).join(', ')
    const reasons = [...new Set(ranks.map((rank) => LOSS[this.#peers.get(rank)?.lost as string] ?? ENDED))]
    return lostRanks(ranks, `lost ${names}: ${reasons.join(', or ')}`)
  }

  #overdue({ kind, sequence }: Operation): Failure {
    const now = performance.now()
    const silent = (peer: Peer) => now - peer.heard > SILENT_MS
    const ranks = this.#ranks((peer) => peer.at < sequence || silent(peer))
    const missing = ranks.map((rank) => {
      const peer = this.#peers.get(rank) as Peer
      const state = silent(peer) ? `silent for ${Math.round(now - peer.heard)} ms` : `at operation #${peer.at}`
      return `${this.#machines.describe(rank)}, ${state}`
    })
    const operation = `${kind} #${sequence}`
    return {
      code: 'COLLECTIVE_TIMEOUT',
      what:
        ranks.length > 0
          ? `${nameRanks(ranks)} did not arrive at ${operation} in time`
          : `${operation} did not end in time, although all ranks are at it: MPI does not get through`,
      ranks,
      actual: { missing: missing.length > 0 ? missing : 'none', timeoutMs: this.#timeoutMs },
      rule: 'every rank arrives within timeoutMs',
      remedy: 'find out what the missing ranks do; if they are only slow, raise RANKWISE_TIMEOUT_MS',
    }
  }

  #aborted({ kind, sequence }: Operation, cause: unknown): void {
    const what = `rank ${this.#rank} aborted ${kind} #${sequence}`
    const ranks = [this.#rank]
    this.fail({ code: 'ABORTED', what, ranks, cause }, { code: 'RANK_LOST', what, ranks })
  }

  /**
   * Why an operation failed. The ranks of one machine hear of an end from each other at once, and from all others a
   * little later why.
   */
  async #reason(error: unknown): Promise<Failure> {
    if (this.#failure === undefined && isLocalEnd(error)) {
      await this.#until(() => this.#failure !== undefined, AbortSignal.timeout(WORD_MS))
    }
    if (this.#failure === undefined) {
      const what = `rank ${this.#rank} failed: ${error instanceof Error ? error.message : String(error)}`
      this.fail({ code: codeOf(error), what, ranks: [this.#rank], cause: error })
    }
    return this.#failure as unknown as Failure
  }

  #ranks(is: (peer: Peer) => boolean): number[] {
    return [...this.#peers].filter(([, peer]) => is(peer)).map(([rank]) => rank)
  }

  /** Resolves when `condition` holds, the group has failed, or `signal` is aborted. Keeps the process alive. */
  #until(condition: () => boolean, signal?: AbortSignal): Promise<void> {
    return new Promise((resolve) => {
      const alive = setInterval(() => look(), BEAT_MS)
      const look = () => {
        if (!condition() && signal?.aborted !== true && (this.#failure === undefined || this.#closed)) return
        clearInterval(alive)
        signal?.removeEventListener('abort', look)
        this.#waiting.delete(look)
        resolve()
      }
      signal?.addEventListener('abort', look)
      this.#waiting.add(look)
      look()
    })
  }

  #settle(): void {
    for (const look of this.#waiting) look()
  }
}

/** Interrupts an operation whose group has ended. */
class GroupEnded extends Error {
  override readonly name = 'GroupEnded'
}

/** What the ways in which a connection can end mean. */
const LOSS: Readonly<Record<string, string>> = {
  ETIMEDOUT: 'its machine or the network does not answer',
  EHOSTUNREACH: 'its machine cannot be reached',
  ENETUNREACH: 'its network cannot be reached',
}
const ENDED = 'its process has ended'

function lostRanks(ranks: readonly number[], what: string): Failure {
  return {
    code: 'RANK_LOST',
    what,
    ranks,
    rule: 'every rank takes part in every operation',
    remedy: 'look at the output of the lost ranks for the first error',
  }
}

function isLocalEnd(error: unknown): boolean {
  return error instanceof RankwiseError && ['ABORTED', 'RANK_LOST', 'COLLECTIVES_DESTROYED'].includes(error.code)
}

function codeOf(error: unknown): string {
  return error instanceof RankwiseError ? error.code : 'RANK_LOST'
}

import { RankwiseError, textOf } from '@rankwise/core'
import {
  describeOperation,
  type Failure,
  failureError,
  lost,
  nameRanks,
  type Operation,
} from '@rankwise/core/collectives'
import type { Message } from './connection.ts'
import type { Mesh, MeshListener } from './mesh.ts'

/** How often ranks tell each other which operation they are at. */
const BEAT_MS = 250
/** A rank that says nothing for so long is stopped, or holds its event loop. */
const SILENT_MS = 3 * BEAT_MS
/** Ranks that are lost within this time, as all of one machine are, are named together. */
const COLLECT_MS = 50
/** How long a rank waits for word from the others about what has ended an operation on its machine. */
const WORD_MS = 1_000

/** Longest reason that is passed on, in characters, so that the message stays below the limit of a connection. */
const WHAT_LENGTH = 4_096

/** Whose state it is. */
export interface GroupStateOptions {
  readonly rank: number
  readonly worldSize: number
  readonly timeoutMs: number
  /** `rank 3 (process 4711)` */
  readonly describe: (rank: number) => string
  /** What carries the data, for the message when it does not get through although all ranks are there. */
  readonly medium: string
  /** How messages tell the group from others; empty for the first one. @default '' */
  readonly label?: string
}

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
  readonly #options: GroupStateOptions
  readonly #rank: number
  readonly #timeoutMs: number
  readonly #peers = new Map<number, Peer>()
  readonly #beat: NodeJS.Timeout
  readonly #waiting = new Set<() => void>()
  #collecting: NodeJS.Timeout | undefined
  #current: Operation | undefined
  #at = 0
  #failure: Failure | undefined
  #closed = false

  constructor(mesh: Mesh, options: GroupStateOptions) {
    const { rank, worldSize, timeoutMs } = options
    this.#mesh = mesh
    this.#options = options
    this.#rank = rank
    this.#timeoutMs = timeoutMs
    const heard = performance.now()
    for (let peer = 0; peer < worldSize; peer++) {
      if (peer !== rank) this.#peers.set(peer, { at: 0, heard, ready: false, left: undefined, lost: undefined })
    }
    this.#beat = setInterval(() => mesh.broadcast({ at: this.#at }), BEAT_MS).unref()
  }

  /** From now on it hears of the others, and of what they have said already. */
  listen(): void {
    this.#mesh.listen(this)
  }

  get failure(): Failure | undefined {
    return this.#failure
  }

  /** Ends the group on all ranks. @param verdict what the others report, if it is not the failure itself */
  fail(failure: Failure, verdict: Failure = failure): void {
    if (this.#failure !== undefined || this.#closed) return
    this.#failure = failure
    const { code, what, ranks, actual, rule, remedy } = verdict
    this.#mesh.broadcast({ failure: { code, what: what.slice(0, WHAT_LENGTH), ranks, actual, rule, remedy } })
    this.#settle()
    this.onFailure(failure)
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
      rule: 'every rank joins within timeoutMs',
    })
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
      throw failureError(await this.#reason(error), this.#where(operation))
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
  async close(): Promise<void> {
    this.#closed = true
    clearInterval(this.#beat)
    clearTimeout(this.#collecting)
    await this.#mesh.close()
  }

  /**
   * A connection for data has ended, and with it what needs it. If the rank is gone or has left, the connection for
   * messages tells so by then.
   */
  connectionEnded(rank: number): void {
    setTimeout(() => {
      const { left, lost: why } = this.#peers.get(rank) as Peer
      if (left !== undefined || why !== undefined || this.#closed) return
      this.fail(lost([rank], `the connection to ${this.#options.describe(rank)} has ended`))
    }, WORD_MS).unref()
  }

  onMessage(rank: number, message: Message): void {
    const peer = this.#peers.get(rank) as Peer
    peer.heard = performance.now()
    if (typeof message.at === 'number') peer.at = message.at
    if (message.ready === true) peer.ready = true
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
    if (left.length > 0) this.fail(lost(left, `${nameRanks(left)} left the group`))
  }

  #lost(): Failure {
    const ranks = this.#ranks(({ lost }) => lost !== undefined)
    const names = ranks.map((rank) => this.#options.describe(rank)).join(', ')
    const reasons = [...new Set(ranks.map((rank) => LOSS[this.#peers.get(rank)?.lost as string] ?? ENDED))]
    return lost(ranks, `lost ${names}: ${reasons.join(', or ')}`)
  }

  #overdue({ kind, sequence }: Operation): Failure {
    const now = performance.now()
    const silent = (peer: Peer) => now - peer.heard > SILENT_MS
    const ranks = this.#ranks((peer) => peer.at < sequence || silent(peer))
    const missing = ranks.map((rank) => {
      const peer = this.#peers.get(rank) as Peer
      const state = silent(peer) ? `silent for ${Math.round(now - peer.heard)} ms` : `at operation #${peer.at}`
      return `${this.#options.describe(rank)}, ${state}`
    })
    const operation = `${kind} #${sequence}`
    const mute = this.#ranks(silent)
    const says = mute.length === 1 ? 'says' : 'say'
    const why = mute.length > 0 ? `: the process of ${nameRanks(mute)} ${says} nothing, as if it were stopped` : ''
    return {
      code: 'COLLECTIVE_TIMEOUT',
      what:
        ranks.length > 0
          ? `${nameRanks(ranks)} did not arrive at ${operation} in time${why}`
          : `${operation} did not end in time, although all ranks are at it: ${this.#options.medium} does not get through`,
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
      const what = `rank ${this.#rank} failed: ${error instanceof Error ? error.message : textOf(error)}`
      this.fail({ code: codeOf(error), what, ranks: [this.#rank], cause: error })
    }
    return this.#failure as unknown as Failure
  }

  #where(operation: Operation): string {
    const { label = '' } = this.#options
    const text = describeOperation(operation)
    return label === '' ? text : `${text} in the ${label}`
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

function isLocalEnd(error: unknown): boolean {
  return error instanceof RankwiseError && ['ABORTED', 'RANK_LOST', 'COLLECTIVES_DESTROYED'].includes(error.code)
}

function codeOf(error: unknown): string {
  return error instanceof RankwiseError ? error.code : 'RANK_LOST'
}

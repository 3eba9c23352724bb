import { setImmediate, setTimeout } from 'node:timers/promises'
import { isRunning, processState, RankwiseError } from '@rankwise/core'
import { type Failure, failureError, lost, nameRanks, type Verdict } from '@rankwise/core/collectives'
import type { Member } from './membership.ts'
import { NCCL_REMOTE_ERROR } from './nccl-types.ts'
import type { NoticeBoard } from './notice-board.ts'

/** How long a rank polls at every turn of the event loop; then every millisecond, the finest timer that Node has. */
const SPIN_MS = 2
/** How often a waiting rank asks how the others are. A quarter of the timeout, if that is less. */
const LOOK_MS = 100
/** What a lost rank had given to the GPU before may still arrive; also how long an error of NCCL waits for its reason. */
const GRACE_MS = 500
/** How long a rank that gives up asks where the others are. */
const ARRIVALS_MS = 400
/** How long a rank that leaves waits until what it had to tell is told. A store that answers takes milliseconds. */
const SETTLE_MS = 1_000

/** One operation as it runs on this rank, or the start of the group, which has number 0. */
export interface Turn {
  readonly sequence: number
  /** `allReduce #3` */
  readonly name: string
  /** The operation in full. */
  readonly describe: () => string
  readonly signal: AbortSignal | undefined
  readonly deadline: number
  /** When this rank last asked how the others are. */
  looked: number
}

/** Who watches, whom, and how long. */
export interface WatchOptions {
  readonly board: NoticeBoard
  readonly members: readonly Member[]
  readonly rank: number
  readonly timeoutMs: number
}

/** Reasons to give up that the GPU may still prove wrong. */
interface Suspicion {
  readonly failure: Failure
  readonly since: number
}

/**
 * Waits for the GPU without holding the event loop, and finds out why it does not come to an end: NCCL itself does not
 * notice ranks that are gone, stopped, or at another operation.
 */
export class Watch {
  readonly #board: NoticeBoard
  readonly #rank: number
  readonly #worldSize: number
  readonly #timeoutMs: number
  readonly #lookMs: number
  /** Ranks whose processes can be looked at. */
  readonly #neighbours: readonly Member[]
  #failure: Failure | undefined
  #suspicion: Suspicion | undefined
  #inquiring = false
  #completed = 0
  #left = false
  #published: Promise<void> = Promise.resolve()

  constructor({ board, members, rank, timeoutMs }: WatchOptions) {
    const self = members[rank] as Member
    this.#board = board
    this.#rank = rank
    this.#worldSize = members.length
    this.#timeoutMs = timeoutMs
    this.#lookMs = Math.min(LOOK_MS, timeoutMs / 4)
    this.#neighbours = members.filter((member) => member !== self && member.pidNamespace === self.pidNamespace)
  }

  get failed(): boolean {
    return this.#failure !== undefined
  }

  begin(turn: Pick<Turn, 'sequence' | 'name' | 'describe' | 'signal'>): Turn {
    const now = performance.now()
    this.#suspicion = undefined
    return { ...turn, deadline: now + this.#timeoutMs, looked: now }
  }

  /**
   * Runs `body` as one operation. Any failure ends the group: no rank can know where the others stand.
   *
   * @throws RankwiseError `RANK_LOST`, `COLLECTIVE_TIMEOUT`, `COLLECTIVE_MISMATCH`, `ABORTED`, `COLLECTIVES_DESTROYED`,
   * `NCCL_ERROR`, `CUDA_ERROR`
   */
  async run<T>(turn: Turn, body: () => Promise<T>): Promise<T> {
    try {
      this.#requireRunning(turn)
      const result = await body()
      this.#completed = turn.sequence
      return result
    } catch (error) {
      throw this.#failure === undefined ? await this.#explain(turn, error) : error
    }
  }

  /**
   * Resolves when `isDone` says so.
   *
   * @param isDone asks the GPU or NCCL; throws when they failed
   */
  async until(turn: Turn, isDone: () => boolean): Promise<void> {
    const started = performance.now()
    for (;;) {
      this.#requireRunning(turn)
      if (isDone()) return
      const now = performance.now()
      if (now >= turn.deadline) throw this.end(await this.#overdue(turn), turn)
      if (now - turn.looked >= this.#lookMs) this.#look(turn, now)
      const { since, failure } = this.#suspicion ?? { since: now }
      if (failure !== undefined && now - since >= GRACE_MS) throw this.end(failure, turn)
      await (now - started < SPIN_MS ? setImmediate() : setTimeout(1))
    }
  }

  /** Ends the group with a failure, as the error of an operation. See {@link fail}. */
  end(failure: Failure, turn: Turn, verdict?: Verdict): Error {
    this.fail(failure, verdict)
    return failureError(this.#failure ?? failure, turn.describe())
  }

  /**
   * Ends the group on this rank and tells the others; only the first failure counts.
   *
   * @param verdict what the others report, if it is not the failure itself
   */
  fail(failure: Failure, verdict: Verdict = failure): void {
    if (this.#failure !== undefined || this.#left) return
    this.#failure = failure
    const { code, what, ranks } = verdict
    this.#publish(this.#board.publish({ kind: 'failed', verdict: { code, what, ranks } }))
  }

  /** Ends the group on this rank without an error for the others, unless they wait for it. */
  leave(): void {
    if (this.#left) return
    this.#left = true
    // Those that failed know; the others have to learn that this rank does not come any more.
    if (this.#failure === undefined) {
      this.#publish(this.#board.publish({ kind: 'left', rank: this.#rank, sequence: this.#completed }))
    }
    this.#failure ??= {
      code: 'COLLECTIVES_DESTROYED',
      what: 'this rank has left the group',
      ranks: [],
      rule: 'no operation after destroy',
    }
  }

  /** Resolves when what this rank had to tell is told, or cannot be. */
  async settled(): Promise<void> {
    const told = new AbortController()
    const patience = setTimeout(SETTLE_MS, undefined, { signal: told.signal }).catch(() => {})
    await Promise.race([this.#published, patience])
    told.abort()
  }

  #requireRunning(turn: Turn): void {
    if (this.#failure !== undefined) throw failureError(this.#failure, turn.describe())
    if (turn.signal?.aborted !== true) return
    const what = `rank ${this.#rank} aborted ${turn.name}`
    const ranks = [this.#rank]
    throw this.end({ code: 'ABORTED', what, ranks, cause: turn.signal.reason }, turn, {
      code: 'RANK_LOST',
      what,
      ranks,
    })
  }

  /** A store that is gone took its rank with it: nobody is left to be told, or they find out in the same way. */
  #publish(published: Promise<void>): void {
    this.#published = Promise.all([this.#published, published.catch(() => {})]).then(() => {})
  }

  /** NCCL reports that a connection broke, seldom which rank broke it: the others may know more. */
  async #explain(turn: Turn, error: unknown): Promise<Error> {
    const end = performance.now() + GRACE_MS
    while (this.#failure === undefined && this.#suspicion === undefined && performance.now() < end) {
      this.#look(turn, performance.now())
      await setTimeout(10)
    }
    const known = this.#failure ?? this.#suspicion?.failure
    if (known !== undefined) return this.end({ ...known, cause: error }, turn)
    if (error instanceof RankwiseError && error.actual.result === NCCL_REMOTE_ERROR) {
      return this.end(lost([], `a rank ended, or the network to it failed: ${error.actual.error}`, error), turn)
    }
    const what = `rank ${this.#rank} failed: ${error instanceof Error ? error.message : String(error)}`
    const ranks = [this.#rank]
    const code = error instanceof RankwiseError ? error.code : 'RANK_LOST'
    return this.end({ code, what, ranks, cause: error }, turn, { code: 'RANK_LOST', what, ranks })
  }

  #look(turn: Turn, now: number): void {
    turn.looked = now
    const died = this.#neighbours.filter(({ pid, startTime }) => !isRunning(pid, startTime)).map(({ rank }) => rank)
    if (died.length > 0) this.#suspect(lost(died, `the process of ${nameRanks(died)} has ended`))
    if (this.#inquiring) return
    this.#inquiring = true
    this.#inquire(turn)
      .catch((error: unknown) => {
        // A process that is known to have ended says more than the store that went with it.
        if (this.#suspicion === undefined) this.#suspect(storeLost(error))
      })
      .finally(() => {
        this.#inquiring = false
      })
  }

  #suspect(failure: Failure): void {
    this.#suspicion = { failure, since: this.#suspicion?.since ?? performance.now() }
  }

  async #inquire(turn: Turn): Promise<void> {
    await this.#board.arrive(turn.sequence)
    for (const notice of await this.#board.news()) {
      if (notice.kind === 'failed') this.#failure ??= notice.verdict
      else if (notice.sequence < turn.sequence)
        this.#failure ??= lost([notice.rank], `rank ${notice.rank} left the group`)
    }
  }

  async #overdue(turn: Turn): Promise<Failure> {
    const ranks = await this.#missing(turn)
    const named = ranks.length > 0
    return {
      code: 'COLLECTIVE_TIMEOUT',
      what: named
        ? `${nameRanks(ranks)} did not arrive at ${turn.name} in time`
        : `all ranks arrived at ${turn.name}, but NCCL did not finish it in time`,
      ranks,
      actual: { ...(named ? { missing: this.#describe(ranks) } : {}), timeoutMs: this.#timeoutMs },
      rule: 'every rank arrives within timeoutMs',
      remedy: named
        ? 'find out what the missing ranks do; if they are only slow, raise RANKWISE_TIMEOUT_MS'
        : 'check the network between the machines (NCCL_SOCKET_IFNAME, NCCL_IB_HCA), with NCCL_DEBUG=INFO',
    }
  }

  /** Ranks that have not told that they are where this one is. */
  async #missing({ sequence }: Turn): Promise<number[]> {
    const arrivals = this.#board.arrive(sequence).then(() => this.#board.arrivals(this.#worldSize))
    const known = await Promise.race([arrivals.catch(() => []), setTimeout(ARRIVALS_MS, [])])
    return known.flatMap((arrived, rank) => (arrived < sequence ? [rank] : []))
  }

  #describe(ranks: readonly number[]): string {
    return ranks
      .map((rank) => {
        const neighbour = this.#neighbours.find((member) => member.rank === rank)
        if (neighbour === undefined) return `rank ${rank}`
        return `rank ${rank} (process ${neighbour.pid}, state ${processState(neighbour.pid)?.state ?? 'gone'})`
      })
      .join(', ')
  }
}

function storeLost(error: unknown): Failure {
  const { ranks } = error instanceof RankwiseError ? error.actual : {}
  const why = error instanceof Error ? error.message : String(error)
  return lost(Array.isArray(ranks) ? ranks : [], `the store of the group cannot be reached: ${why}`, error)
}

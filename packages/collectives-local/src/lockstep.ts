import { availableParallelism } from 'node:os'
import { setImmediate } from 'node:timers/promises'
import type { Arena, Half, Verdict } from './arena.ts'
import { type Failure, failureError, nameRanks } from './failure.ts'
import type { FailureDetector } from './failure-detector.ts'
import { describeEncoded, describeOperation, encodeOperation, type Operation } from './operation.ts'

/**
 * How long a rank polls before it sleeps. A rank that sleeps goes on 0.11 to 0.15 ms after it is woken (measured on 2
 * cores), so polling for as long costs at most twice what the better choice would have, and does not hold up the event
 * loop.
 */
const SPIN_MS = 0.15

/** Longest time that an operation of many chunks holds the event loop when no rank is ever waited for. */
const HOLD_MS = 10

/** One operation as it runs on this rank. */
export interface Turn {
  readonly operation: Operation
  readonly signal: AbortSignal | undefined
  readonly half: Half
  readonly deadline: number
  /** Whether all ranks are known to run the same operation. */
  verified: boolean
  /** When the event loop last had its chance. */
  released: number
}

/** Keeps the ranks in step: every rank meets the others, or learns why it cannot. */
export class Lockstep {
  readonly #arena: Arena
  readonly #detector: FailureDetector
  readonly #rank: number
  readonly #timeoutMs: number
  /** Polling a core that the awaited rank needs would only delay it. */
  readonly #spins: boolean
  #phase = 0
  #half: Half = 0
  #failure: Failure | undefined
  #left = false

  constructor(arena: Arena, detector: FailureDetector, rank: number, timeoutMs: number) {
    this.#arena = arena
    this.#detector = detector
    this.#rank = rank
    this.#timeoutMs = timeoutMs
    this.#spins = arena.worldSize <= availableParallelism()
  }

  /**
   * Runs `body` as the next operation. Any failure ends the group: no rank can know where the others stand.
   *
   * @throws RankwiseError `RANK_LOST`, `COLLECTIVE_TIMEOUT`, `COLLECTIVE_MISMATCH`, `ABORTED`, `COLLECTIVES_DESTROYED`
   */
  async run<T>(
    operation: Operation,
    signal: AbortSignal | undefined,
    body: (turn: Turn) => Promise<T> | T,
  ): Promise<T> {
    const now = performance.now()
    const half = this.#half
    const turn: Turn = { operation, signal, half, deadline: now + this.#timeoutMs, verified: false, released: now }
    try {
      this.#requireRunning(turn)
      encodeOperation(operation, this.#arena.operation(this.#rank, half))
      this.#half = half === 0 ? 1 : 0
      const result = await body(turn)
      if (!turn.verified) await this.meet(turn)
      return result
    } catch (error) {
      // A Failure has already ended the group; anything else would leave the others waiting for this rank.
      if (this.#failure === undefined) this.fail(unexpected(this.#rank, error))
      throw error
    }
  }

  /** Waits until every rank is here. The first meeting of an operation also compares what the ranks are at. */
  async meet(turn: Turn): Promise<void> {
    this.#requireRunning(turn)
    this.#phase = (this.#phase + 1) | 0
    this.#arena.arrive(this.#rank, this.#phase)
    if (this.#spin()) await this.#release(turn)
    else await this.#wait(turn)
    if (!turn.verified) this.#verify(turn)
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
    this.#arena.giveUp(this.#rank, { code, what, ranks })
  }

  /** Ends the group on this rank without an error for the others, unless they wait for it. */
  leave(): void {
    if (this.#left) return
    this.#left = true
    this.#failure ??= {
      code: 'COLLECTIVES_DESTROYED',
      what: 'this rank has left the group',
      ranks: [],
      rule: 'no operation after destroy',
    }
    this.#arena.leave(this.#rank)
  }

  #spin(): boolean {
    if (this.#arena.allArrived(this.#phase)) return true
    if (!this.#spins) return false
    const end = performance.now() + SPIN_MS
    do {
      for (let i = 0; i < 50; i++) if (this.#arena.allArrived(this.#phase)) return true
    } while (performance.now() < end)
    return false
  }

  async #release(turn: Turn): Promise<void> {
    if (performance.now() - turn.released < HOLD_MS) return
    await setImmediate()
    turn.released = performance.now()
  }

  async #wait(turn: Turn): Promise<void> {
    for (let sleeps = 0; ; sleeps++) {
      const ticket = this.#arena.ticket
      if (this.#arena.allArrived(this.#phase)) break
      this.#requireRunning(turn)
      const failure = this.#detector.find(this.#phase, sleeps > 0) ?? this.#overdue(turn)
      if (failure !== undefined) throw this.#end(failure, turn)
      await this.#arena.sleep(ticket)
    }
    turn.released = performance.now()
  }

  #requireRunning(turn: Turn): void {
    if (this.#failure !== undefined) throw failureError(this.#failure, describeOperation(turn.operation))
    if (turn.signal?.aborted !== true) return
    const what = `rank ${this.#rank} aborted ${turn.operation.kind} #${turn.operation.sequence}`
    const ranks = [this.#rank]
    const failure = { code: 'ABORTED', what, ranks, cause: turn.signal.reason }
    throw this.#end(failure, turn, { code: 'RANK_LOST', what, ranks })
  }

  #overdue(turn: Turn): Failure | undefined {
    if (performance.now() < turn.deadline) return undefined
    const ranks = this.#detector.missing(this.#phase)
    return {
      code: 'COLLECTIVE_TIMEOUT',
      what: `${nameRanks(ranks)} did not arrive at ${turn.operation.kind} #${turn.operation.sequence} in time`,
      ranks,
      actual: { missing: this.#detector.describeMissing(this.#phase), timeoutMs: this.#timeoutMs },
      rule: 'every rank arrives within timeoutMs',
      remedy: 'find out what the missing ranks do; if they are only slow, raise RANKWISE_TIMEOUT_MS',
    }
  }

  #verify(turn: Turn): void {
    const { worldSize } = this.#arena
    const ranks = Array.from({ length: worldSize }, (_, rank) => rank)
    const operations = ranks.map((rank) => this.#arena.operation(rank, turn.half))
    turn.verified = true
    if (operations.every((words) => words.every((word, i) => word === operations[0]?.[i]))) return
    const actual = Object.fromEntries(operations.map((words, rank) => [`rank ${rank} at`, describeEncoded(words)]))
    throw this.#end(
      {
        code: 'COLLECTIVE_MISMATCH',
        what: 'the ranks are at different operations',
        ranks: [],
        actual,
        rule: 'every rank calls the same operations in the same order, with the same shapes and dtypes',
      },
      turn,
    )
  }

  #end(failure: Failure, turn: Turn, verdict?: Verdict): Error {
    this.fail(failure, verdict)
    return failureError(failure, describeOperation(turn.operation))
  }
}

function unexpected(rank: number, cause: unknown): Failure {
  const what = `rank ${rank} failed: ${cause instanceof Error ? cause.message : String(cause)}`
  return { code: 'RANK_LOST', what, ranks: [rank], cause }
}

import { availableParallelism } from 'node:os'
import { setImmediate } from 'node:timers/promises'
import { textOf } from '@rankwise/core'
import {
  describeEncoded,
  describeOperation,
  encodeOperation,
  type Failure,
  failureError,
  nameRanks,
  type Operation,
  type Verdict,
} from '@rankwise/core/collectives'
import type { Arena, Half } from './arena.ts'
import { type Cursor, OPERATION_HALF, PHASE, VERIFIED } from './cursor.ts'
import type { FailureDetector } from './failure-detector.ts'
import type { Turn } from './turn.ts'

/**
 * How long a rank polls before it sleeps. A rank that sleeps goes on 0.11 to 0.15 ms after it is woken (measured on 2
 * cores), so polling for as long costs at most twice what the better choice would have, and does not hold up the event
 * loop.
 */
const SPIN_MS = 0.15

/** Longest time that operations hold the event loop when no rank is ever waited for. */
const HOLD_MS = 10

/** Which rank this is, and how it is spoken of. */
export interface LockstepOptions {
  readonly rank: number
  readonly timeoutMs: number
  /** How messages tell the group from others. @default '' */
  readonly label?: string
}

/** Keeps the ranks in step: every rank meets the others, or learns why it cannot. */
export class Lockstep {
  readonly #arena: Arena
  readonly #detector: FailureDetector
  readonly #rank: number
  readonly #timeoutMs: number
  readonly #label: string
  /** Polling a core that the awaited rank needs would only delay it. */
  readonly #spins: boolean
  readonly #cursor: Cursor
  /** When the event loop last had its chance. */
  #released = performance.now()
  #failure: Failure | undefined
  #left = false

  constructor(
    arena: Arena,
    detector: FailureDetector,
    cursor: Cursor,
    { rank, timeoutMs, label = '' }: LockstepOptions,
  ) {
    this.#arena = arena
    this.#cursor = cursor
    this.#detector = detector
    this.#rank = rank
    this.#timeoutMs = timeoutMs
    this.#label = label
    this.#spins = arena.worldSize <= availableParallelism()
  }

  /**
   * Runs `body` as the next operation. Any failure ends the group: no rank can know where the others stand. An operation
   * that no rank had to be waited for returns its result at once: a promise takes as long as the rest of a small one.
   *
   * @throws RankwiseError `RANK_LOST`, `COLLECTIVE_TIMEOUT`, `COLLECTIVE_MISMATCH`, `ABORTED`, `COLLECTIVES_DESTROYED`
   */
  run<T>(operation: Operation, signal: AbortSignal | undefined, body: (turn: Turn) => Promise<T> | T): Promise<T> | T {
    const turn: Turn = { operation, signal, deadline: undefined }
    try {
      this.requireRunning(turn)
      const half: Half = this.#cursor[OPERATION_HALF] === 0 ? 1 : 0
      encodeOperation(operation, this.#arena.operation(this.#rank, half))
      this.#cursor[OPERATION_HALF] = half
      this.#cursor[VERIFIED] = 0
      const result = body(turn)
      const complete = !(result instanceof Promise) && this.#cursor[VERIFIED] === 1 && !this.#holdsTooLong()
      return complete ? result : this.#complete(turn, result)
    } catch (error) {
      throw this.#stopFor(error)
    }
  }

  async #complete<T>(turn: Turn, started: Promise<T> | T): Promise<T> {
    try {
      const result = await started
      if (this.#cursor[VERIFIED] === 0) await this.meet(turn)
      await this.release()
      return result
    } catch (error) {
      throw this.#stopFor(error)
    }
  }

  /** A Failure has already ended the group; anything else would leave the others waiting for this rank. */
  #stopFor(error: unknown): unknown {
    if (this.#failure === undefined) this.fail(unexpected(this.#rank, error))
    return error
  }

  /** Waits until every rank is here. The first meeting of an operation also compares what the ranks are at. */
  async meet(turn: Turn): Promise<void> {
    this.requireRunning(turn)
    const phase = (this.#phase + 1) | 0
    this.#cursor[PHASE] = phase
    this.#arena.arrive(this.#rank, phase)
    if (this.#spin()) await this.release()
    else await this.wait(turn)
    if (this.#cursor[VERIFIED] === 0) this.verify(turn)
  }

  /** Waits, asleep, until every rank is where this one has arrived, or until it is known that one will not come. */
  async wait(turn: Turn): Promise<void> {
    turn.deadline ??= performance.now() + this.#timeoutMs
    for (let sleeps = 0; ; sleeps++) {
      const ticket = this.#arena.ticket
      if (this.#arena.allArrived(this.#phase)) break
      this.requireRunning(turn)
      const failure = this.#detector.find(this.#phase, sleeps > 0) ?? this.#overdue(turn)
      if (failure !== undefined) throw this.#end(failure, turn)
      await this.#arena.sleep(ticket)
    }
    this.#released = performance.now()
  }

  /** Gives the event loop its chance if it has been held for long. */
  async release(): Promise<void> {
    if (!this.#holdsTooLong()) return
    await setImmediate()
    this.#released = performance.now()
  }

  /** Compares what the ranks are at. @throws RankwiseError `COLLECTIVE_MISMATCH` */
  verify(turn: Turn): void {
    const half = this.#cursor[OPERATION_HALF] as Half
    const operations = Array.from({ length: this.#arena.worldSize }, (_, rank) => this.#arena.operation(rank, half))
    this.#cursor[VERIFIED] = 1
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

  /** @throws RankwiseError what the group failed with, or `ABORTED` when the operation was */
  requireRunning(turn: Turn): void {
    if (this.#failure !== undefined) throw failureError(this.#failure, this.#where(turn))
    if (turn.signal?.aborted !== true) return
    const what = `rank ${this.#rank} aborted ${turn.operation.kind} #${turn.operation.sequence}`
    const ranks = [this.#rank]
    const failure = { code: 'ABORTED', what, ranks, cause: turn.signal.reason }
    throw this.#end(failure, turn, { code: 'RANK_LOST', what, ranks })
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
    this.#retract()
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
    this.#retract()
  }

  get #phase(): number {
    return this.#cursor[PHASE] as number
  }

  #retract(): void {
    if (!this.#arena.allArrived(this.#phase)) this.#arena.retract(this.#rank, this.#phase)
  }

  #holdsTooLong(): boolean {
    return performance.now() - this.#released > HOLD_MS
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

  #overdue(turn: Turn): Failure | undefined {
    if (turn.deadline === undefined || performance.now() < turn.deadline) return undefined
    const ranks = this.#detector.missing(this.#phase)
    const stopped = this.#detector.stopped(this.#phase)
    const late = `${nameRanks(ranks)} did not arrive at ${turn.operation.kind} #${turn.operation.sequence} in time`
    return {
      code: 'COLLECTIVE_TIMEOUT',
      what: stopped.length === 0 ? late : `${late}: the process of ${nameRanks(stopped)} is stopped`,
      ranks,
      actual: { missing: this.#detector.describeMissing(this.#phase), timeoutMs: this.#timeoutMs },
      rule: 'every rank arrives within timeoutMs',
      remedy: 'find out what the missing ranks do; if they are only slow, raise RANKWISE_TIMEOUT_MS',
    }
  }

  #end(failure: Failure, turn: Turn, verdict?: Verdict): Error {
    this.fail(failure, verdict)
    return failureError(failure, this.#where(turn))
  }

  #where({ operation }: Turn): string {
    const text = describeOperation(operation)
    return this.#label === '' ? text : `${text} in the ${this.#label}`
  }
}

function unexpected(rank: number, cause: unknown): Failure {
  const what = `rank ${rank} failed: ${cause instanceof Error ? cause.message : textOf(cause)}`
  return { code: 'RANK_LOST', what, ranks: [rank], cause }
}

import { isRunning, processState } from '@rankwise/core'
import { type Failure, lost, nameRanks } from '@rankwise/core/collectives'
import type { Arena } from './arena.ts'
import type { Member } from './member.ts'

/** Finds out why ranks that are waited for do not come. Each rank asks the kernel itself; no rank reports for another. */
export class FailureDetector {
  readonly #arena: Arena
  readonly #peers: readonly Member[]

  constructor(arena: Arena, members: readonly Member[], rank: number) {
    this.#arena = arena
    this.#peers = members.filter((member) => member.rank !== rank)
  }

  /** Ranks that have not reached `phase`. */
  missing(phase: number): number[] {
    return this.#missingPeers(phase).map(({ rank }) => rank)
  }

  /** Ranks that have not reached `phase` because their processes are stopped, as by SIGSTOP or a debugger. */
  stopped(phase: number): number[] {
    const states = this.#missingPeers(phase).map(({ rank, pid }) => ({ rank, state: processState(pid)?.state }))
    return states.filter(({ state }) => state === 'T' || state === 't').map(({ rank }) => rank)
  }

  /** The missing ranks and what their processes do: `rank 1 (process 4711, state T)`. */
  describeMissing(phase: number): string {
    return this.#missingPeers(phase)
      .map(({ rank, pid }) => `rank ${rank} (process ${pid}, state ${processState(pid)?.state ?? 'gone'})`)
      .join(', ')
  }

  /**
   * Why `phase` will never be reached; undefined while it still may be.
   *
   * @param lookAtProcesses ask the kernel whether the missing processes still run, 15 us each
   */
  find(phase: number, lookAtProcesses: boolean): Failure | undefined {
    const missing = this.#missingPeers(phase)
    // Before what they have written: a rank writes its verdict and then ends.
    const gone = lookAtProcesses ? missing.filter(({ pid, startTime }) => !isRunning(pid, startTime)) : []
    const left = missing.filter(({ rank }) => this.#arena.hasLeft(rank)).map(({ rank }) => rank)
    const verdicts = this.#peers.flatMap(({ rank }) => this.#arena.verdict(rank) ?? [])
    const died = gone
      .map(({ rank }) => rank)
      .filter((rank) => !left.includes(rank) && this.#arena.verdict(rank) === undefined)

    // A rank may have arrived while this one looked, and then have left or ended, as it may.
    const still = this.missing(phase)
    const lateAndGone = died.filter((rank) => still.includes(rank))
    const lateAndLeft = left.filter((rank) => still.includes(rank))
    if (lateAndGone.length > 0) return lost(lateAndGone, `the process of ${nameRanks(lateAndGone)} has ended`)
    if (still.length > 0 && verdicts[0] !== undefined) return verdicts[0]
    if (lateAndLeft.length > 0) return lost(lateAndLeft, `${nameRanks(lateAndLeft)} left the group`)
    return undefined
  }

  #missingPeers(phase: number): Member[] {
    return this.#peers.filter(({ rank }) => !this.#arena.hasArrived(rank, phase))
  }
}

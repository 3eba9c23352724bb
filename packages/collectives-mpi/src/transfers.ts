import { setImmediate, setTimeout } from 'node:timers/promises'
import type { ChunkBuffer } from './chunk-buffer.ts'
import type { Mpi, MpiRequest } from './mpi.ts'

/** Part of a buffer, in bytes. */
export interface Span {
  readonly buffer: ChunkBuffer
  readonly start: number
  readonly bytes: number
}

/** One message between two processes. */
export interface Transfer extends Span {
  readonly direction: 'send' | 'receive'
  readonly peer: number
}

/**
 * How long a leader asks MPI in turn with the event loop, before it sleeps a millisecond between. All other ranks of its
 * machine sleep meanwhile, so it takes the core from nobody.
 */
const EAGER_MS = 5
/** How long it asks at a time. MPI moves data only while it is asked: over TCP, UCX some 100 KB each time. */
const BURST_MS = 0.1

/** Runs transfers side by side without ever waiting inside MPI. */
export class Transfers {
  readonly #mpi: Mpi
  readonly #requireRunning: () => void

  /** @param requireRunning throws when the group has ended, which ends every transfer */
  constructor(mpi: Mpi, requireRunning: () => void) {
    this.#mpi = mpi
    this.#requireRunning = requireRunning
  }

  /**
   * Starts transfers at once and resolves when all are done. Those between two processes with one tag meet in the order in
   * which they are started.
   */
  async run(transfers: readonly Transfer[], tag: number): Promise<void> {
    this.#requireRunning()
    await this.#finish(transfers.filter(({ bytes }) => bytes > 0).map((transfer) => this.#start(transfer, tag)))
  }

  #start({ direction, buffer, start, bytes, peer }: Transfer, tag: number): MpiRequest {
    const address = buffer.address + BigInt(start)
    return direction === 'send'
      ? this.#mpi.send(address, bytes, peer, tag)
      : this.#mpi.receive(address, bytes, peer, tag)
  }

  async #finish(requests: MpiRequest[]): Promise<void> {
    const started = performance.now()
    let pending = requests
    while (pending.length > 0) {
      this.#requireRunning()
      pending = this.#poll(pending)
      if (pending.length === 0) return
      if (performance.now() - started < EAGER_MS) await setImmediate()
      else await setTimeout(1)
    }
  }

  /** What is still pending after a short while of asking. */
  #poll(requests: readonly MpiRequest[]): MpiRequest[] {
    const end = performance.now() + BURST_MS
    let pending = requests.filter((request) => !this.#mpi.isDone(request))
    while (pending.length > 0 && performance.now() < end) {
      pending = pending.filter((request) => !this.#mpi.isDone(request))
    }
    return pending
  }
}

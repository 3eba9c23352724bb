import type { Mailbox } from './mailbox.ts'
import type { Mpi, MpiRequest } from './mpi.ts'

/** After so long without a result, MPI is asked every 0.1 ms only. */
const EAGER_MS = 5
const PAUSE_MS = 0.1
/** How often MPI is asked in a row. It moves data only while it is asked. */
const BURST = 16

/** The orders of a rank, as MPI carries them out. */
export class Orders {
  readonly #mpi: Mpi
  readonly #mailbox: Mailbox
  readonly #memory: bigint
  /** Transfers that are not done yet, by slot. */
  readonly #pending = new Map<number, MpiRequest[]>()
  readonly #pause = new Int32Array(new SharedArrayBuffer(4))
  #ticket: number | undefined
  #lastDone = 0

  /** @param memory address of the shared memory */
  constructor(mpi: Mpi, mailbox: Mailbox, memory: bigint) {
    this.#mpi = mpi
    this.#mailbox = mailbox
    this.#memory = memory
  }

  /** Starts what is new and finishes what is done. @returns whether anything is pending */
  advance(): boolean {
    this.#accept()
    for (let i = 0; i < BURST && this.#pending.size > 0; i++) this.#poll()
    if (this.#pending.size > 0 && performance.now() - this.#lastDone > EAGER_MS) {
      Atomics.wait(this.#pause, 0, 0, PAUSE_MS)
    }
    return this.#pending.size > 0
  }

  #accept(): void {
    const ticket = this.#mailbox.ordersTicket
    if (ticket === this.#ticket) return
    this.#ticket = ticket
    this.#lastDone = performance.now()
    for (let slot = 0; slot < this.#mailbox.slots; slot++) {
      if (this.#pending.has(slot)) continue
      const order = this.#mailbox.orderIn(slot)
      if (order === undefined) continue
      const requests = order.transfers.map(({ direction, peer, start, bytes }) => {
        const address = this.#memory + BigInt(start)
        return direction === 'send'
          ? this.#mpi.send(address, bytes, peer, order.tag)
          : this.#mpi.receive(address, bytes, peer, order.tag)
      })
      this.#pending.set(slot, requests)
    }
  }

  #poll(): void {
    for (const [slot, requests] of this.#pending) {
      const left = requests.filter((request) => !this.#mpi.isDone(request))
      this.#pending.set(slot, left)
      if (left.length > 0) continue
      this.#pending.delete(slot)
      this.#lastDone = performance.now()
      this.#mailbox.finish(slot)
    }
  }
}

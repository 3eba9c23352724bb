import { viewAs } from '@rankwise/core'

/** Part of the memory that a rank shares with its MPI process. */
export interface Region {
  readonly bytes: Uint8Array
  /** Where it begins, in bytes from the start of the memory. */
  readonly start: number
}

/** One message between two processes; `start` is counted from the start of the shared memory. */
export interface Transfer {
  readonly direction: 'send' | 'receive'
  readonly peer: number
  readonly start: number
  readonly bytes: number
}

/** Transfers that run side by side. */
export interface Order {
  readonly tag: number
  readonly transfers: readonly Transfer[]
}

/** Every one of the leaders may send to and receive from every other one. */
export const MAX_MACHINES = 64

/** What the MPI process is at. */
export const STATE = { starting: 0, ready: 1, failed: 2, finalizing: 3, finalized: 4 } as const

// Words that one side writes and the other polls have cache lines of their own. Offsets in 32-bit words.
const ORDERS_TICKET = 0
const NEWS_TICKET = 16
const STATE_WORD = 32
const MPI_RANK = 48
const MPI_SIZE = 49
const TEXT_LENGTH = 50
const TEXT = 64
const TEXT_BYTES = 4096
const SLOTS = 2048
/** Headers and two chunks may be on their way at a time. */
const SLOT_COUNT = 8
const SLOT_WORDS = 4 + 4 * 2 * MAX_MACHINES
// ... and from the start of a slot.
const STATUS = 0
const TAG = 1
const COUNT = 2
const TRANSFERS = 4

const FREE = 0
const ORDERED = 1
const DONE = 2

/** Bytes at the start of the memory that are not for data. */
export const MAILBOX_BYTES = Math.ceil(((SLOTS + SLOT_COUNT * SLOT_WORDS) * 4) / 4096) * 4096

const encoder = new TextEncoder()
const decoder = new TextDecoder()

/** How a rank tells its MPI process what to transfer, and learns that it is done: words in shared memory. */
export class Mailbox {
  readonly #bytes: Uint8Array
  readonly #words: Int32Array
  readonly #address: bigint
  readonly #wake: (address: bigint) => void

  /**
   * @param address where `bytes` lies in this process
   * @param wake wakes whoever sleeps on the word at an address
   */
  constructor(bytes: Uint8Array, address: bigint, wake: (address: bigint) => void) {
    this.#bytes = bytes
    this.#words = viewAs('int32', bytes.subarray(0, MAILBOX_BYTES))
    this.#address = address
    this.#wake = wake
  }

  /** Changes with every order and with {@link finalize}; the MPI process sleeps on it. */
  get ordersTicket(): number {
    return Atomics.load(this.#words, ORDERS_TICKET)
  }

  get ordersAddress(): bigint {
    return this.#address + BigInt(ORDERS_TICKET * 4)
  }

  /** Changes with everything that the MPI process has to tell; the rank sleeps on it. */
  get newsTicket(): number {
    return Atomics.load(this.#words, NEWS_TICKET)
  }

  get newsAddress(): bigint {
    return this.#address + BigInt(NEWS_TICKET * 4)
  }

  get state(): number {
    return Atomics.load(this.#words, STATE_WORD)
  }

  /** The rank gives an order; returns its slot. @throws Error when too many are pending */
  order({ tag, transfers }: Order): number {
    const slots = Array.from({ length: SLOT_COUNT }, (_, slot) => slot)
    const slot = slots.find((candidate) => Atomics.load(this.#words, word(candidate, STATUS)) === FREE)
    if (slot === undefined || transfers.length > 2 * MAX_MACHINES) throw new Error('too many transfers at a time')
    this.#words[word(slot, TAG)] = tag
    this.#words[word(slot, COUNT)] = transfers.length
    for (const [i, { direction, peer, start, bytes }] of transfers.entries()) {
      this.#words.set([direction === 'send' ? 1 : 0, peer, start, bytes], word(slot, TRANSFERS + 4 * i))
    }
    Atomics.store(this.#words, word(slot, STATUS), ORDERED)
    this.#ring(ORDERS_TICKET)
    return slot
  }

  /** Whether an order is done; its slot is free after that. */
  takeDone(slot: number): boolean {
    return Atomics.compareExchange(this.#words, word(slot, STATUS), DONE, FREE) === DONE
  }

  /** The MPI process reads the order of a slot, if there is one. */
  orderIn(slot: number): Order | undefined {
    if (Atomics.load(this.#words, word(slot, STATUS)) !== ORDERED) return undefined
    const count = this.#words[word(slot, COUNT)] as number
    const transfers = Array.from({ length: count }, (_, i): Transfer => {
      const [send, peer, start, bytes] = this.#words.subarray(word(slot, TRANSFERS + 4 * i)) as unknown as Quad
      return { direction: send === 1 ? 'send' : 'receive', peer, start: start >>> 0, bytes }
    })
    return { tag: this.#words[word(slot, TAG)] as number, transfers }
  }

  get slots(): number {
    return SLOT_COUNT
  }

  /** The MPI process has done the order of a slot. */
  finish(slot: number): void {
    Atomics.store(this.#words, word(slot, STATUS), DONE)
    this.#ring(NEWS_TICKET)
  }

  /** The rank asks for the end. */
  finalize(): void {
    Atomics.store(this.#words, STATE_WORD, STATE.finalizing)
    this.#ring(ORDERS_TICKET)
  }

  /** The MPI process says what it is at, with a text of up to 4096 bytes. */
  tell(state: number, text = ''): void {
    const target = this.#bytes.subarray(TEXT * 4, TEXT * 4 + TEXT_BYTES)
    this.#words[TEXT_LENGTH] = encoder.encodeInto(text, target).written
    Atomics.store(this.#words, STATE_WORD, state)
    this.#ring(NEWS_TICKET)
  }

  get text(): string {
    return decoder.decode(this.#bytes.slice(TEXT * 4, TEXT * 4 + (this.#words[TEXT_LENGTH] as number)))
  }

  /** Which of how many processes MPI takes the MPI process for. */
  get world(): { readonly rank: number; readonly size: number } {
    return { rank: this.#words[MPI_RANK] as number, size: this.#words[MPI_SIZE] as number }
  }

  set world({ rank, size }) {
    this.#words[MPI_RANK] = rank
    this.#words[MPI_SIZE] = size
  }

  #ring(ticket: number): void {
    Atomics.add(this.#words, ticket, 1)
    this.#wake(this.#address + BigInt(ticket * 4))
  }
}

type Quad = readonly [number, number, number, number]

function word(slot: number, offset: number): number {
  return SLOTS + slot * SLOT_WORDS + offset
}

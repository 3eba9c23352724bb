import type { Communicator } from './communicator.ts'
import type { Address, PinnedMemory } from './cuda-runtime.ts'
import type { Turn } from './watch.ts'

/** A part of a slot, in bytes. */
export interface Range {
  readonly start: number
  readonly length: number
}

/** A piece of an operation on tensors in host memory. */
export interface Chunk {
  /** What this rank puts in. */
  readonly upload: Range
  /** What it takes out. */
  readonly download: Range
  /** Writes `upload` of a slot. */
  fill(slot: Uint8Array): void
  /** Starts the operation on the same slot of the device. */
  issue(device: Address): void
  /** Reads `download` of the slot. */
  drain(slot: Uint8Array): void
}

interface Slot {
  readonly pinned: PinnedMemory
  readonly device: Address
  /** Happens when the chunk is back in pinned memory. */
  readonly event: Address
  chunk: Chunk | undefined
}

/**
 * Takes tensors of host memory through the GPU. There are two slots, each in pinned memory and on the device: while the
 * GPU works on one, the host fills or drains the other. They are allocated when the first tensor comes.
 */
export class Staging {
  readonly #communicator: Communicator
  readonly #slotBytes: number
  #slots: readonly [Slot, Slot] | undefined
  #next: 0 | 1 = 0

  constructor(communicator: Communicator, slotBytes: number) {
    this.#communicator = communicator
    this.#slotBytes = slotBytes
  }

  /** Resolves when all chunks are through. */
  async run(turn: Turn, chunks: Iterable<Chunk>): Promise<void> {
    for (const chunk of chunks) {
      const slot = this.#take()
      await this.#drain(turn, slot)
      await this.#start(turn, slot, chunk)
    }
    await this.#drain(turn, this.#take())
    await this.#drain(turn, this.#take())
  }

  /** The slot that was used longest ago. */
  #take(): Slot {
    this.#slots ??= [this.#allocate(), this.#allocate()]
    const slot = this.#slots[this.#next]
    this.#next = this.#next === 0 ? 1 : 0
    return slot
  }

  async #start(turn: Turn, slot: Slot, chunk: Chunk): Promise<void> {
    const { cuda, channel } = this.#communicator
    const { upload, download } = chunk
    chunk.fill(slot.pinned.bytes)
    if (upload.length > 0) {
      const from = BigInt(upload.start)
      cuda.copyToDevice(slot.device + from, slot.pinned.address + from, upload.length, channel.stream)
    }
    await this.#communicator.issue(turn, () => chunk.issue(slot.device))
    if (download.length > 0) {
      const from = BigInt(download.start)
      cuda.copyToHost(slot.pinned.address + from, slot.device + from, download.length, channel.stream)
    }
    cuda.recordEvent(slot.event, channel.stream)
    slot.chunk = chunk
  }

  async #drain(turn: Turn, slot: Slot): Promise<void> {
    if (slot.chunk === undefined) return
    await this.#communicator.done(turn, slot.event)
    slot.chunk.drain(slot.pinned.bytes)
    slot.chunk = undefined
  }

  #allocate(): Slot {
    return {
      pinned: this.#communicator.allocatePinned(this.#slotBytes),
      device: this.#communicator.allocate(this.#slotBytes),
      event: this.#communicator.createEvent(),
      chunk: undefined,
    }
  }
}

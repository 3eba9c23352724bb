import { viewAs } from '@rankwise/core'
import { describeEncoded, encodeOperation, OPERATION_WORDS, type Operation } from '@rankwise/core/collectives'
import type { Communicator } from './communicator.ts'
import type { Address, PinnedMemory } from './cuda-runtime.ts'
import type { Turn, Watch } from './watch.ts'

const FINGERPRINT_BYTES = OPERATION_WORDS * 4

/**
 * Compares what the ranks are about to do, before they do it: NCCL does not check, and ranks at different operations hang
 * or get each other's bytes. The comparison is an all-gather of 36 bytes per rank, the same for every operation, so it
 * cannot itself go wrong; one small kernel costs less than the round trips of a store, whose server all ranks share.
 */
export class Fingerprints {
  readonly #communicator: Communicator
  readonly #watch: Watch
  readonly #rank: number
  readonly #worldSize: number
  readonly #device: Address
  readonly #pinned: PinnedMemory
  readonly #event: Address

  constructor(communicator: Communicator, watch: Watch, rank: number, worldSize: number) {
    this.#communicator = communicator
    this.#watch = watch
    this.#rank = rank
    this.#worldSize = worldSize
    this.#device = communicator.allocate(worldSize * FINGERPRINT_BYTES)
    this.#pinned = communicator.allocatePinned(worldSize * FINGERPRINT_BYTES)
    this.#event = communicator.createEvent()
  }

  /** @throws RankwiseError `COLLECTIVE_MISMATCH` with what every rank called */
  async compare(turn: Turn, operation: Operation): Promise<void> {
    const { cuda, nccl, channel } = this.#communicator
    const offset = this.#rank * FINGERPRINT_BYTES
    const send = this.#device + BigInt(offset)
    encodeOperation(operation, this.#words(this.#rank))
    cuda.copyToDevice(send, this.#pinned.address + BigInt(offset), FINGERPRINT_BYTES, channel.stream)
    const span = { send, receive: this.#device, count: OPERATION_WORDS }
    await this.#communicator.issue(turn, () => nccl.allGatherWords(span, channel))
    cuda.copyToHost(this.#pinned.address, this.#device, this.#worldSize * FINGERPRINT_BYTES, channel.stream)
    cuda.recordEvent(this.#event, channel.stream)
    await this.#communicator.done(turn, this.#event)
    this.#requireEqual(turn)
  }

  #words(rank: number): Int32Array {
    const start = rank * FINGERPRINT_BYTES
    return viewAs('int32', this.#pinned.bytes.subarray(start, start + FINGERPRINT_BYTES))
  }

  #requireEqual(turn: Turn): void {
    const all = Array.from({ length: this.#worldSize }, (_, rank) => this.#words(rank))
    if (all.every((words) => words.every((word, i) => word === all[0]?.[i]))) return
    const actual = Object.fromEntries(all.map((words, rank) => [`rank ${rank} at`, describeEncoded(words)]))
    throw this.#watch.end(
      {
        code: 'COLLECTIVE_MISMATCH',
        what: 'the ranks are at different operations',
        ranks: [],
        actual,
        rule: 'every rank calls the same operations in the same order, with the same shapes and dtypes, on host or device alike',
      },
      turn,
    )
  }
}

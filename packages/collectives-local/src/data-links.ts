import type { Socket } from 'node:net'
import {
  describeEncoded,
  encodeOperation,
  type Failure,
  OPERATION_WORDS,
  type Operation,
} from '@rankwise/core/collectives'
import { DataLink } from './data-link.ts'

/** A connection and the rank at its other end. */
export interface Peer {
  readonly rank: number
  readonly link: DataLink
}

/**
 * The connections of a rank that carry data. Every operation begins with its encoded self on all of them, so that the
 * ranks know that they are at the same one before any data is taken.
 */
export class DataLinks {
  /** All other ranks, in ascending order. */
  readonly peers: readonly Peer[]
  readonly #rank: number
  #verified: Promise<void> = Promise.resolve()

  /** @param sockets by rank */
  constructor(rank: number, sockets: ReadonlyMap<number, Socket>) {
    this.#rank = rank
    const links = [...sockets].map(([peer, socket]) => ({ rank: peer, link: new DataLink(socket) }))
    this.peers = links.sort((a, b) => a.rank - b.rank)
  }

  get worldSize(): number {
    return this.peers.length + 1
  }

  /** Resolves when all ranks are known to be at the same operation; what they send comes next on every connection. */
  get verified(): Promise<void> {
    return this.#verified
  }

  /** Tells the others what this rank is about to do. @param onMismatch ends the group, and throws */
  begin(operation: Operation, onMismatch: (failure: Failure) => never): void {
    const own = new Int32Array(OPERATION_WORDS)
    encodeOperation(operation, own)
    for (const { link } of this.peers) {
      link.gather()
      link.write(bytesOf(own))
    }
    this.#verified = this.#compare(own, onMismatch)
    // Whoever awaits it gets the rejection; an operation may fail before.
    this.#verified.catch(() => {})
  }

  /** Resolves when everything that was written is on its way, whatever becomes of this process. */
  async sent(): Promise<void> {
    for (const { link } of this.peers) await link.sent()
  }

  /** Ends what waits on any connection. */
  interrupt(error: Error): void {
    for (const { link } of this.peers) link.interrupt(error)
  }

  destroy(): void {
    for (const { link } of this.peers) link.destroy()
  }

  async close(): Promise<void> {
    await Promise.all(this.peers.map(({ link }) => link.close()))
  }

  async #compare(own: Int32Array, onMismatch: (failure: Failure) => never): Promise<void> {
    const operations: Int32Array[] = []
    operations[this.#rank] = own
    await Promise.all(
      this.peers.map(({ rank, link }) => {
        const words = new Int32Array(OPERATION_WORDS)
        operations[rank] = words
        return link.read(bytesOf(words))
      }),
    )
    if (operations.every((words) => words.every((word, i) => word === own[i]))) return
    onMismatch({
      code: 'COLLECTIVE_MISMATCH',
      what: 'the ranks are at different operations',
      ranks: [],
      actual: Object.fromEntries(operations.map((words, rank) => [`rank ${rank} at`, describeEncoded(words)])),
      rule: 'every rank calls the same operations in the same order, with the same shapes and dtypes',
    })
  }
}

function bytesOf({ buffer, byteOffset, byteLength }: Int32Array): Uint8Array {
  return new Uint8Array(buffer, byteOffset, byteLength)
}

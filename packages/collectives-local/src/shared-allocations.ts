import { RankwiseError, type Tensor } from '@rankwise/core'
import type { SharedRange } from './exchange.ts'
import type { SharedPlace } from './operation.ts'
import type { SharedMemory } from './shared-memory.ts'

/** Memory for one tensor on every rank: parts of one size, in rank order. */
interface Allocation {
  /** Counts the allocations of the group from 1. */
  readonly number: number
  readonly memory: SharedMemory
  released: boolean
}

/** A tensor that is reduced where it is. */
export interface InPlace {
  readonly place: SharedPlace
  readonly range: SharedRange
}

/** Parts start at pages, which every dtype and every vector is aligned to. */
const PAGE = 4096

/** Bytes that the part of each rank takes. */
export function partBytes(byteLength: number): number {
  return Math.max(Math.ceil(byteLength / PAGE), 1) * PAGE
}

// The addresses of released memory may be used for something else only when no view can reach them any more.
const unreachable = new FinalizationRegistry<() => void>((unmap) => unmap())

/** What a rank holds of the memory that its group shares for tensors. */
export class SharedAllocations {
  readonly #rank: number
  readonly #worldSize: number
  readonly #live = new Set<Allocation>()
  readonly #byBuffer = new WeakMap<ArrayBufferLike, Allocation>()
  #count = 0
  /** Whether the group has never allocated anything. */
  get isEmpty(): boolean {
    return this.#count === 0
  }

  constructor(rank: number, worldSize: number) {
    this.#rank = rank
    this.#worldSize = worldSize
  }

  /** Takes over memory that all ranks have opened: the part of this rank, and what releases it. */
  add(memory: SharedMemory, byteLength: number): { bytes: Uint8Array; release: () => void } {
    this.#count += 1
    const allocation: Allocation = { number: this.#count, memory, released: false }
    const buffer = memory.view(this.#rank * this.#partBytes(allocation), byteLength)
    this.#live.add(allocation)
    this.#byBuffer.set(buffer, allocation)
    unreachable.register(buffer, () => {
      this.#live.delete(allocation)
      memory.unmap()
    })
    return { bytes: new Uint8Array(buffer), release: () => this.#release(allocation) }
  }

  /**
   * Where a tensor lies in shared memory; undefined when it does not.
   *
   * @throws RankwiseError `TENSOR_DISPOSED`
   */
  find({ data }: Tensor): InPlace | undefined {
    const allocation = this.#byBuffer.get(data.buffer)
    if (allocation === undefined) return undefined
    if (allocation.released) throw disposed(allocation)
    const place = { allocation: allocation.number, offset: data.byteOffset }
    const range = { bytes: allocation.memory.bytes, offset: data.byteOffset, byteLength: data.byteLength }
    return { place, range }
  }

  /** Gives all memory back. */
  releaseAll(): void {
    for (const allocation of this.#live) this.#release(allocation)
  }

  #release(allocation: Allocation): void {
    if (allocation.released) return
    allocation.released = true
    this.#live.delete(allocation)
    allocation.memory.detach()
  }

  #partBytes({ memory }: Allocation): number {
    return memory.bytes.byteLength / this.#worldSize
  }
}

function disposed({ number }: Allocation): RankwiseError {
  return new RankwiseError('TENSOR_DISPOSED', 'the tensor has been disposed of', {
    where: `shared tensor #${number} of the group`,
    rule: 'a shared tensor takes part in operations until dispose, and until its group is destroyed',
  })
}

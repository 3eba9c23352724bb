import type { Tensor } from '@rankwise/core'
import { RankwiseError } from '@rankwise/core'
import { requireAvailable } from './available-memory.ts'
import { tensorDisposed } from './shared-allocations.ts'
import type { Allocations, TensorMemory } from './transport.ts'

/** Memory of one tensor, which is freed when no view of it is left. */
interface Allocation {
  /** Counts the allocations of the group from 1. */
  readonly number: number
  readonly buffer: WeakRef<ArrayBuffer>
  released: boolean
}

/** What a rank has allocated for tensors where ranks share no memory: nothing is reduced in place. */
export class PrivateAllocations implements Allocations {
  readonly #live = new Set<Allocation>()
  readonly #byBuffer = new WeakMap<ArrayBufferLike, Allocation>()
  #count = 0

  get isEmpty(): boolean {
    return this.#count === 0
  }

  /** Takes over memory from {@link newMemory}. */
  add(buffer: ArrayBuffer): TensorMemory {
    this.#count += 1
    const allocation: Allocation = { number: this.#count, buffer: new WeakRef(buffer), released: false }
    for (const other of this.#live) if (other.buffer.deref() === undefined) this.#live.delete(other)
    this.#live.add(allocation)
    this.#byBuffer.set(buffer, allocation)
    return { bytes: new Uint8Array(buffer), release: () => this.#release(allocation) }
  }

  /** Refuses what was disposed of, as shared memory is refused. */
  find({ data }: Tensor): undefined {
    const allocation = this.#byBuffer.get(data.buffer)
    if (allocation?.released === true) throw tensorDisposed(allocation.number)
  }

  releaseAll(): void {
    for (const allocation of this.#live) this.#release(allocation)
  }

  /** Views hold zeros from now on, as those of shared memory do. */
  #release(allocation: Allocation): void {
    if (allocation.released) return
    allocation.released = true
    this.#live.delete(allocation)
    const buffer = allocation.buffer.deref()
    if (buffer !== undefined) new Uint8Array(buffer).fill(0)
  }
}

/** Zeros. @throws RankwiseError `SHARED_MEMORY` when there is not enough memory */
export function newMemory(byteLength: number): ArrayBuffer {
  requireAvailable(byteLength)
  try {
    return new ArrayBuffer(byteLength)
  } catch (cause) {
    throw new RankwiseError('SHARED_MEMORY', 'there is not enough memory for the tensor', {
      actual: { bytes: byteLength },
      rule: 'a tensor is at most as large as an ArrayBuffer can be',
      cause,
    })
  }
}

import { closeSync, fstatSync, ftruncateSync, openSync } from 'node:fs'
import { RankwiseError } from '@rankwise/core'
import { requireAvailable } from './available-memory.ts'
import type { Native } from './native.ts'

// `koffi.view` aborts the process beyond 4 GiB.
const MAX_BYTES = 2 ** 32 - 4096

/**
 * Memory that several processes map. It is anonymous (memfd): the kernel frees it with the last process that has it,
 * however that process ends, so nothing is left in /dev/shm even after SIGKILL.
 */
export class SharedMemory {
  readonly bytes: Uint8Array
  readonly address: bigint
  readonly #native: Native
  #descriptor: number | undefined
  #mapped = true

  private constructor(native: Native, descriptor: number, byteLength: number) {
    this.#native = native
    this.#descriptor = descriptor
    this.address = native.map(descriptor, byteLength)
    this.bytes = new Uint8Array(native.view(this.address, byteLength))
  }

  /**
   * Takes all of the memory at once: what is missing later would end the process with SIGBUS, or have the kernel choose
   * a process to kill.
   *
   * @throws RankwiseError `SHARED_MEMORY` when there is not enough, or the system refuses it.
   */
  static create(native: Native, byteLength: number): SharedMemory {
    requireSize(byteLength)
    const descriptor = native.createMemory()
    return SharedMemory.#owning(descriptor, () => {
      requireAvailable(byteLength)
      setSize(descriptor, byteLength)
      native.reserve(descriptor, byteLength)
      return new SharedMemory(native, descriptor, byteLength)
    })
  }

  /**
   * Opens the memory that process `pid` holds under its file descriptor `descriptor`.
   *
   * @throws RankwiseError `SHARED_MEMORY` when it cannot be opened or has another size.
   */
  static open(native: Native, pid: number, descriptor: number, byteLength: number): SharedMemory {
    requireSize(byteLength)
    const path = `/proc/${pid}/fd/${descriptor}`
    const own = openDescriptor(path)
    return SharedMemory.#owning(own, () => {
      const { size } = fstatSync(own)
      if (size !== byteLength) throw wrongSize(path, size, byteLength)
      return new SharedMemory(native, own, byteLength)
    })
  }

  static #owning(descriptor: number, build: () => SharedMemory): SharedMemory {
    try {
      return build()
    } catch (error) {
      closeSync(descriptor)
      throw error
    }
  }

  /** Where other processes can open the memory; undefined after {@link closeDescriptor}. */
  get descriptor(): number | undefined {
    return this.#descriptor
  }

  /** Closes the file descriptor; the mapping stays. */
  closeDescriptor(): void {
    if (this.#descriptor !== undefined) closeSync(this.#descriptor)
    this.#descriptor = undefined
  }

  /**
   * Gives the memory back, but keeps its addresses: what reads or writes a view of it after this gets private memory of
   * zeros. {@link unmap} frees the addresses, when no view is left.
   */
  detach(): void {
    this.closeDescriptor()
    if (this.#mapped) this.#native.replace(this.address, this.bytes.byteLength)
  }

  /** A view of part of the memory. */
  view(offset: number, bytes: number): ArrayBuffer {
    return this.#native.view(this.address + BigInt(offset), bytes)
  }

  /** Frees everything. Reading or writing a view of the memory after this crashes the process. */
  unmap(): void {
    this.closeDescriptor()
    if (this.#mapped) this.#native.unmap(this.address, this.bytes.byteLength)
    this.#mapped = false
  }
}

function setSize(descriptor: number, byteLength: number): void {
  try {
    ftruncateSync(descriptor, byteLength)
  } catch (cause) {
    throw new RankwiseError('SHARED_MEMORY', 'the system refuses shared memory of this size', {
      actual: { bytes: byteLength, errno: (cause as NodeJS.ErrnoException).code },
      remedy: 'check the limits of this process (ulimit -f), or choose smaller slotBytes',
      cause,
    })
  }
}

function openDescriptor(path: string): number {
  try {
    return openSync(path, 'r+')
  } catch (cause) {
    throw new RankwiseError('SHARED_MEMORY', 'the memory of rank 0 cannot be opened', {
      where: path,
      rule: 'all ranks run as one user, in one pid namespace, with /proc mounted',
      remedy: 'start all ranks with one launcher, inside one container',
      cause,
    })
  }
}

function wrongSize(path: string, actual: number, announced: number): RankwiseError {
  return new RankwiseError('SHARED_MEMORY', 'the memory of rank 0 has another size than announced', {
    where: path,
    actual: { bytes: actual, announced },
    rule: 'all ranks are in one pid namespace',
  })
}

function requireSize(byteLength: number): void {
  if (byteLength > 0 && byteLength <= MAX_BYTES) return
  throw new RankwiseError('SHARED_MEMORY', 'the size of the shared memory is out of range', {
    actual: { bytes: byteLength },
    rule: `from 1 to ${MAX_BYTES} bytes`,
  })
}

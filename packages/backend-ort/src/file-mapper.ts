import type { BigIntStats } from 'node:fs'
import { type FileHandle, open } from 'node:fs/promises'
import type { ByteRange } from '@rankwise/core'
import { mappingError } from './mapping-error.ts'
import type { NativeMemory } from './native-memory.ts'

/** Bytes of a file from the start of one window to the start of the next. */
const STRIDE = 2 ** 31

/** Less than 4 GiB, which is as long as a buffer may be in Node 20. */
const WINDOW_BYTES = 2 * STRIDE - 2 ** 16

/** Most bytes of one range: so much lies in one window, wherever it starts. */
export const MAX_MAPPED_BYTES: number = WINDOW_BYTES - STRIDE

/** Ranges of a file in the address space of this process. */
export interface FileMapping {
  /** The bytes of each range. They must not be touched after `release`. */
  readonly views: readonly Uint8Array[]
  /** Unmaps what nothing else uses; idempotent. */
  release(): void
}

/**
 * Maps files for reading, window by window. The pages are those of the page cache, and nothing is read before it is
 * touched.
 *
 * Windows are much larger than tensors, because V8 takes a buffer over foreign memory for pressure and collects garbage
 * every 64 MB of them: to map 500 tensors of 20 MB one by one took 17 s of CPU beside a heap of 120 MB.
 */
export class FileMapper {
  readonly #native: NativeMemory
  /** What is mapped now, by file and index. */
  readonly #windows = new Map<string, Window>()

  constructor(native: NativeMemory) {
    this.#native = native
  }

  /**
   * Maps all ranges or none. They stay mapped when the file is renamed or deleted; a file must not be truncated or
   * written to while it is mapped.
   *
   * @param ranges - each of 1 to {@link MAX_MAPPED_BYTES} bytes, at any offset
   * @throws RankwiseError `BACKEND_MAPPING`
   */
  async map(file: string, ranges: readonly ByteRange[]): Promise<FileMapping> {
    const handle = await openFile(file)
    const used: Window[] = []
    try {
      const stats = await handle.stat({ bigint: true })
      const views = ranges.map(({ offset, length }) => {
        if (offset + length > stats.size) throw mappingError(file, 'the file ends before the tensor does')
        const window = this.#window(file, handle, stats, Math.floor(offset / STRIDE))
        window.users++
        used.push(window)
        return window.bytes.subarray(offset - window.offset, offset - window.offset + length)
      })
      return { views, release: () => this.#release(used.splice(0)) }
    } catch (error) {
      this.#release(used)
      throw error
    } finally {
      await handle.close()
    }
  }

  #window(file: string, handle: FileHandle, stats: BigIntStats, index: number): Window {
    // A file that replaces another under the same name is another file.
    const key = [stats.dev, stats.ino, stats.size, stats.mtimeNs, index].join()
    const known = this.#windows.get(key)
    if (known !== undefined) return known
    const offset = index * STRIDE
    const length = Math.min(WINDOW_BYTES, Number(stats.size) - offset)
    const address = this.#native.map(handle.fd, offset, length)
    if (typeof address === 'string') throw mappingError(file, `mmap failed with ${address}`)
    const window = { key, address, offset, bytes: new Uint8Array(this.#native.view(address, length)), users: 0 }
    this.#windows.set(key, window)
    return window
  }

  #release(windows: readonly Window[]): void {
    for (const window of windows) {
      window.users--
      if (window.users > 0) continue
      this.#windows.delete(window.key)
      this.#native.unmap(window.address, window.bytes.byteLength)
    }
  }
}

/** Consecutive bytes of a file. */
interface Window {
  readonly key: string
  readonly address: bigint
  /** Of the first byte in the file. */
  readonly offset: number
  readonly bytes: Uint8Array
  /** Ranges in it that are in use. */
  users: number
}

async function openFile(file: string): Promise<FileHandle> {
  try {
    return await open(file, 'r')
  } catch (cause) {
    throw mappingError(file, 'the file cannot be opened', cause)
  }
}

import { readSync } from 'node:fs'
import { constants, type FileHandle, open, stat } from 'node:fs/promises'
import { throwIfAborted } from '../abort.ts'
import { RankwiseError } from '../errors.ts'

/** Options of reading a tensor. */
export interface ReadOptions {
  /** Aborting it fails the read with `ABORTED`. */
  readonly signal?: AbortSignal | undefined
}

/**
 * Most bytes that one call asks for. `FileHandle.read` aborts the process from 2^31 bytes on and stops short at
 * 2^31 - 1. Calls of 1 to 16 MiB read 7 GB/s from the page cache, of 64 MiB half of that, and an abort waits for one.
 */
const MAX_CALL_BYTES = 16 * 1024 * 1024

/** A regular file that is open for reading at any offset. */
export class ByteReader {
  readonly path: string
  /** Bytes of the file when it was opened. */
  readonly size: number
  readonly #handle: FileHandle
  #closing: Promise<void> | undefined

  private constructor(path: string, size: number, handle: FileHandle) {
    this.path = path
    this.size = size
    this.#handle = handle
  }

  /** @throws RankwiseError `SAFETENSORS_OPEN` when there is no such file or it may not be read */
  static async open(path: string): Promise<ByteReader> {
    try {
      // Opening a FIFO would wait for a writer, and a directory opens without complaint.
      if (!(await stat(path)).isFile()) throw new Error('not a regular file')
      const handle = await open(path, constants.O_RDONLY)
      try {
        return new ByteReader(path, (await handle.stat()).size, handle)
      } catch (error) {
        await handle.close()
        throw error
      }
    } catch (cause) {
      throw new RankwiseError('SAFETENSORS_OPEN', 'the file cannot be opened', {
        where: path,
        actual: { problem: (cause as Error).message },
        cause,
      })
    }
  }

  /**
   * Fills `target` with the bytes from `offset` on.
   *
   * @param where What is read, for messages.
   * @throws RankwiseError `SAFETENSORS_TRUNCATED` when the file ends before `target` is full, `SAFETENSORS_READ`,
   *   `SAFETENSORS_CLOSED`, `ABORTED`
   */
  async readInto(target: Uint8Array, offset: number, where: string, { signal }: ReadOptions = {}): Promise<void> {
    for (let filled = 0; filled < target.length; ) {
      throwIfAborted(signal, where)
      const bytes = await this.#readOnce(target.subarray(filled, filled + MAX_CALL_BYTES), offset + filled, where)
      filled += this.#requireBytes(bytes, offset + filled, offset + target.length, where)
    }
  }

  /**
   * As `readInto`, on the calling thread: 2-3 us where that takes 15, and nothing else happens meanwhile. For a few KiB.
   *
   * @throws RankwiseError `SAFETENSORS_TRUNCATED`, `SAFETENSORS_READ`, `SAFETENSORS_CLOSED`
   */
  readIntoSync(target: Uint8Array, offset: number, where: string): void {
    for (let filled = 0; filled < target.length; ) {
      const bytes = this.#readOnceSync(target, filled, offset + filled, where)
      filled += this.#requireBytes(bytes, offset + filled, offset + target.length, where)
    }
  }

  /** Closes the file once its pending reads have ended; idempotent. */
  close(): Promise<void> {
    this.#closing ??= this.#handle.close()
    return this.#closing
  }

  async #readOnce(target: Uint8Array, offset: number, where: string): Promise<number> {
    this.#requireOpen(where)
    try {
      return (await this.#handle.read(target, 0, target.length, offset)).bytesRead
    } catch (cause) {
      throw unreadable(cause, offset, target.length, where)
    }
  }

  #readOnceSync(target: Uint8Array, filled: number, offset: number, where: string): number {
    this.#requireOpen(where)
    const length = target.length - filled
    try {
      return readSync(this.#handle.fd, target, filled, length, offset)
    } catch (cause) {
      throw unreadable(cause, offset, length, where)
    }
  }

  #requireOpen(where: string): void {
    if (this.#closing !== undefined) throw new RankwiseError('SAFETENSORS_CLOSED', 'the file was closed', { where })
  }

  /** The bytes that a call read, unless it met the end of the file. */
  #requireBytes(bytes: number, endsAt: number, needed: number, where: string): number {
    if (bytes > 0) return bytes
    throw new RankwiseError('SAFETENSORS_TRUNCATED', 'the file became shorter after it was opened', {
      where,
      actual: { bytesWhenOpened: this.size, endsAt, needed },
      remedy: 'do not write to a checkpoint while it is loading',
    })
  }
}

function unreadable(cause: unknown, offset: number, bytes: number, where: string): RankwiseError {
  return new RankwiseError('SAFETENSORS_READ', 'the file cannot be read', {
    where,
    actual: { offset, bytes, problem: (cause as Error).message },
    cause,
  })
}

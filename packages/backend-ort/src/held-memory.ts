/** Memory that may be disposed of while runs read it: it is freed once they have ended. */
export class HeldMemory<M> {
  /** Undefined from when it was disposed. */
  #memory: M | undefined
  #disposed: M | undefined
  #readers = 0
  readonly #free: (memory: M) => void

  /** @param free - gets the memory after it was disposed, when nothing reads it any more */
  constructor(memory: M, free: (memory: M) => void) {
    this.#memory = memory
    this.#free = free
  }

  /** Undefined once it was disposed, even while it is read. */
  get memory(): M | undefined {
    return this.#memory
  }

  /** Keeps it as it is until `release`, also when it is disposed before. */
  retain(): void {
    this.#readers++
  }

  release(): void {
    this.#readers--
    this.#freeUnread()
  }

  /** Idempotent. @returns whether it was not disposed before */
  dispose(): boolean {
    if (this.#memory === undefined) return false
    this.#disposed = this.#memory
    this.#memory = undefined
    this.#freeUnread()
    return true
  }

  #freeUnread(): void {
    if (this.#disposed === undefined || this.#readers > 0) return
    const memory = this.#disposed
    this.#disposed = undefined
    this.#free(memory)
  }
}

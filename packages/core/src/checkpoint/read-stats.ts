/** What reading a checkpoint has cost so far; all its files count into one. */
export class ReadStats {
  /** Bytes of headers read. */
  headerBytes = 0
  /** Bytes of tensors read: those of the shards and, while the disk is slow, single bytes between their parts. */
  bytesRead = 0
  /** Tensors, or shards of tensors, read to the end. */
  tensorsRead = 0
  /** Largest buffer allocated for tensor data. */
  largestBuffer = 0
  readonly #largestBuffers = new Map<string, number>()

  /** `largestBuffer` of each tensor that was read, in bytes, by name. */
  get largestBuffers(): ReadonlyMap<string, number> {
    return this.#largestBuffers
  }

  /** Notes a buffer that was allocated for a tensor. @internal */
  countBuffer(tensor: string, bytes: number): void {
    this.largestBuffer = Math.max(this.largestBuffer, bytes)
    this.#largestBuffers.set(tensor, Math.max(this.#largestBuffers.get(tensor) ?? 0, bytes))
  }
}

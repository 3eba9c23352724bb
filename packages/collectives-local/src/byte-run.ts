/** Several arrays of bytes, seen as one run. */
export class ByteRun {
  readonly byteLength: number
  readonly #parts: readonly Uint8Array[]

  constructor(parts: readonly Uint8Array[]) {
    this.#parts = parts
    this.byteLength = parts.reduce((sum, part) => sum + part.byteLength, 0)
  }

  /** Visits the pieces of the run from `start` on, `count` bytes in all, with their offset from `start`. */
  forEachPiece(start: number, count: number, visit: (piece: Uint8Array, at: number) => void): void {
    let partStart = 0
    for (const part of this.#parts) {
      const from = Math.max(start, partStart)
      const to = Math.min(start + count, partStart + part.byteLength)
      if (from < to) visit(part.subarray(from - partStart, to - partStart), from - start)
      partStart += part.byteLength
    }
  }
}

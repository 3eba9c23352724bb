import koffi from 'koffi'

/** Memory that MPI reads and writes while JavaScript goes on. It never moves, and lives as long as a reference to it. */
export class ChunkBuffer {
  readonly bytes: Uint8Array
  readonly address: bigint

  constructor(byteLength: number) {
    this.bytes = new Uint8Array(Math.max(byteLength, LEAST_BYTES))
    this.address = koffi.address(this.bytes)
  }

  get byteLength(): number {
    return this.bytes.byteLength
  }
}

/** V8 keeps arrays of up to 64 bytes on its own heap, where they move. */
const LEAST_BYTES = 4096

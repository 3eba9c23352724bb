import type { DType } from './dtype.ts'
import type { Tensor } from './tensor.ts'

/** Tensors of one dtype, seen as one run of bytes. */
export class PackedTensors {
  readonly dtype: DType
  readonly byteLength: number
  readonly #parts: readonly Uint8Array[]

  constructor(dtype: DType, tensors: readonly Tensor[]) {
    this.dtype = dtype
    this.#parts = tensors.map(bytesOf)
    this.byteLength = this.#parts.reduce((sum, part) => sum + part.byteLength, 0)
  }

  /** Copies `count` bytes from `start` of the run to `offset` of `target`. */
  copyTo(target: Uint8Array, offset: number, start: number, count: number): void {
    this.#forEachPart(start, count, (part, at) => target.set(part, offset + at))
  }

  /** Copies `count` bytes from `offset` of `source` to `start` of the run. */
  copyFrom(source: Uint8Array, offset: number, start: number, count: number): void {
    this.#forEachPart(start, count, (part, at) => part.set(source.subarray(offset + at, offset + at + part.length)))
  }

  /** Visits the pieces of the run from `start` on, `count` bytes in all, with their offset from `start`. */
  #forEachPart(start: number, count: number, visit: (part: Uint8Array, at: number) => void): void {
    let partStart = 0
    for (const part of this.#parts) {
      const from = Math.max(start, partStart)
      const to = Math.min(start + count, partStart + part.byteLength)
      if (from < to) visit(part.subarray(from - partStart, to - partStart), from - start)
      partStart += part.byteLength
    }
  }
}

/** One run per dtype, in the order in which the dtypes first appear. */
export function packByDtype(tensors: readonly Tensor[]): PackedTensors[] {
  const dtypes = [...new Set(tensors.map(({ dtype }) => dtype))]
  return dtypes.map(
    (dtype) =>
      new PackedTensors(
        dtype,
        tensors.filter((tensor) => tensor.dtype === dtype),
      ),
  )
}

/** The memory of a tensor as bytes. */
export function bytesOf({ data }: Tensor): Uint8Array {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
}

import type { ShardLayout } from '../checkpoint/shard-layout.ts'
import { type ReadableTensorInfo, whereIs } from '../checkpoint/tensor-info.ts'
import { allocate } from '../dtype.ts'
import { RankwiseError } from '../errors.ts'
import { sizeOf, Tensor } from '../tensor.ts'
import { scatter } from './shard-windows.ts'

/** A rank's part of a tensor on its way from the hub. Memory is taken when the first bytes are asked for. */
export class PlannedShard {
  readonly info: ReadableTensorInfo
  readonly layout: ShardLayout
  /** Settles when all bytes are there, or will never be. */
  readonly arrived: Promise<void>
  readonly #settle: { readonly resolve: () => void; readonly reject: (error: unknown) => void }
  #tensor: Tensor | undefined
  #missing = 0

  constructor(info: ReadableTensorInfo, layout: ShardLayout) {
    this.info = info
    this.layout = layout
    let settle = { resolve: () => {}, reject: (_: unknown) => {} }
    this.arrived = new Promise<void>((resolve, reject) => {
      settle = { resolve, reject }
    })
    // Whoever reads the shard sees the error; a shard that nobody reads must not end the process.
    this.arrived.catch(() => undefined)
    this.#settle = settle
  }

  /** Notes how many ranges make up the shard. One without bytes is there at once. */
  expect(ranges: number): void {
    this.#missing = ranges
    if (ranges === 0) this.#settle.resolve()
  }

  /** Whether memory is taken. */
  get isAllocated(): boolean {
    return this.#tensor !== undefined
  }

  /** Takes memory. @throws RankwiseError `SAFETENSORS_TOO_LARGE` */
  allocate(): Tensor {
    this.#tensor ??= this.#newTensor()
    return this.#tensor
  }

  /** Hands the tensor over; the shard forgets it. */
  take(): Tensor {
    const tensor = this.allocate()
    this.#tensor = undefined
    return tensor
  }

  /** Copies what belongs to the shard out of bytes of the file, from `offset` on. */
  put(bytes: Uint8Array, offset: number): void {
    const { data } = this.allocate()
    const target = new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
    scatter(this.layout, target, bytes, offset - this.info.byteOffset)
  }

  /** One of the ranges is complete. */
  rangeArrived(): void {
    this.#missing--
    if (this.#missing === 0) this.#settle.resolve()
  }

  /** The shard will not arrive. */
  fail(error: unknown): void {
    this.#settle.reject(error)
  }

  #newTensor(): Tensor {
    const { dtype, file, name } = this.info
    const { shape, byteLength } = this.layout
    try {
      return new Tensor(dtype, shape, allocate(dtype, sizeOf(shape)))
    } catch (cause) {
      if (!(cause instanceof RangeError)) throw cause
      throw new RankwiseError('SAFETENSORS_TOO_LARGE', 'there is no memory for the tensor', {
        where: whereIs(file, name),
        actual: { bytes: byteLength, shape },
        cause,
      })
    }
  }
}

import { type DeviceTensor, RankwiseError, type Shape, sizeOf, Tensor, viewAs } from '@rankwise/core'
import type { FileMapping } from './file-mapper.ts'
import { HeldMemory } from './held-memory.ts'
import { HostTensor } from './host-tensor.ts'
import {
  formatStorage,
  isWeightDType,
  rowsOf,
  rowsShape,
  type WeightDType,
  type WeightStorage,
} from './weight-storage.ts'

/** What a weight tensor is made of. */
export interface WeightContent {
  /** In order along dimension 0, of one dtype; a weight without rows has one piece without rows. */
  readonly pieces: readonly Tensor<WeightDType>[]
  readonly shape: Shape
  /** Where the pieces lie, when that is not memory of this process. */
  readonly mapping?: FileMapping
}

/** A weight in the dtype it is kept in, in one or several pieces, in memory of this process or in the mapped file. */
export class WeightTensor implements DeviceTensor {
  /** Graphs cast it to float32. */
  readonly dtype: WeightDType
  readonly shape: Shape
  readonly layout: WeightStorage
  readonly storage: string
  readonly byteLength: number
  readonly isMapped: boolean
  readonly #held: HeldMemory<readonly Tensor<WeightDType>[]>
  readonly #onDispose: ((weight: WeightTensor) => void) | undefined

  constructor({ pieces, shape, mapping }: WeightContent, onDispose?: (weight: WeightTensor) => void) {
    this.dtype = (pieces[0] as Tensor<WeightDType>).dtype
    this.shape = shape
    this.layout = { dtype: this.dtype, pieces: pieces.map((piece) => rowsOf(piece.shape)) }
    this.storage = formatStorage(this.layout)
    this.byteLength = pieces.reduce((sum, piece) => sum + piece.byteLength, 0)
    this.isMapped = mapping !== undefined
    // Views of a mapping cannot be detached, so it goes only when nothing can reach it any more.
    this.#held = new HeldMemory(pieces, () => mapping?.release())
    this.#onDispose = onDispose
  }

  /**
   * The weight of this backend behind `tensor`, which may be one that was uploaded; undefined when that holds no weight.
   *
   * @throws RankwiseError `TENSOR_FOREIGN`, `TENSOR_DISPOSED`
   */
  static from(tensor: DeviceTensor): WeightTensor | undefined {
    if (tensor instanceof WeightTensor) return tensor
    const uploaded = HostTensor.from(tensor).tensor
    return isWeight(uploaded) ? new WeightTensor({ pieces: [uploaded], shape: uploaded.shape }) : undefined
  }

  /** Rows `start` to `end` (exclusive) of the weight, which lie in one piece; not a copy. @throws RankwiseError `TENSOR_DISPOSED` */
  rows(start: number, end: number): Tensor<WeightDType> {
    let first = 0
    for (const piece of this.#alive()) {
      const next = first + rowsOf(piece.shape)
      if (start >= first && end <= next) return rowsOfPiece(piece, start - first, end - first)
      first = next
    }
    throw new RankwiseError('WEIGHT_ROWS', 'rows of a weight are not in one piece', {
      actual: { start, end, storage: this.storage },
    })
  }

  /** The weight in memory of this process: what is there already, or else a copy. @throws RankwiseError `TENSOR_DISPOSED` */
  whole(): Tensor<WeightDType> {
    const pieces = this.#alive()
    if (pieces.length === 1 && !this.isMapped) return pieces[0] as Tensor<WeightDType>
    const bytes = new Uint8Array(this.byteLength)
    let position = 0
    for (const { data } of pieces) {
      bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), position)
      position += data.byteLength
    }
    return new Tensor(this.dtype, this.shape, viewAs(this.dtype, bytes))
  }

  /** Keeps the memory where it is until `release`, also when the weight is disposed before. */
  retain(): void {
    this.#held.retain()
  }

  release(): void {
    this.#held.release()
  }

  dispose(): void {
    if (this.#held.dispose()) this.#onDispose?.(this)
  }

  #alive(): readonly Tensor<WeightDType>[] {
    const { memory } = this.#held
    if (memory !== undefined) return memory
    throw new RankwiseError('TENSOR_DISPOSED', 'the weight was disposed', {
      actual: { dtype: this.dtype, shape: this.shape },
    })
  }
}

function isWeight(tensor: Tensor): tensor is Tensor<WeightDType> {
  return isWeightDType(tensor.dtype)
}

function rowsOfPiece({ dtype, shape, data }: Tensor<WeightDType>, start: number, end: number): Tensor<WeightDType> {
  const width = sizeOf(shape.slice(1))
  return new Tensor(dtype, rowsShape(shape, end - start), data.subarray(start * width, end * width))
}

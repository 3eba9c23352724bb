import type { DType, Shape, TensorType } from '@rankwise/core'
import type { ComputeDType } from '../host-dtype.ts'
import { ELEMENT_TYPES } from '../onnx/model.ts'
import type { OnnxBuilder } from '../onnx/onnx-builder.ts'
import { rowsOf, type WeightDType, type WeightStorage } from '../weight-storage.ts'
import { roundToBfloat16 } from './bfloat16.ts'
import type { Lowered, Operand, Part, Parts, StoredParts } from './rule.ts'
import { cutEvenly, type Rows, type Tile, tilesOf } from './tiles.ts'

/** An input of the model, a constant, or what a rule computed. */
export class ValueOperand implements Operand {
  readonly dtype: DType
  readonly shape: Shape
  readonly parts: Parts
  readonly #onnx: OnnxBuilder
  #name: string | undefined

  constructor(onnx: OnnxBuilder, { dtype, shape }: TensorType, lowered: Lowered) {
    this.dtype = dtype
    this.shape = shape
    this.parts = typeof lowered === 'string' ? { dim: 0, parts: [{ name: lowered, size: shape[0] ?? 1 }] } : lowered
    this.#onnx = onnx
  }

  get name(): string {
    this.#name ??= join(this.#onnx, this.parts)
    return this.#name
  }
}

/** What a weight is computed in, whatever it is kept in. */
export interface WeightType {
  readonly dtype: ComputeDType
  readonly shape: Shape
}

/** A weight with elements. It becomes inputs of the graph when a rule asks for it, cut as the rule takes it. */
export class WeightOperand implements Operand {
  readonly dtype: ComputeDType
  readonly shape: Shape
  readonly #onnx: OnnxBuilder
  readonly #storage: WeightStorage
  readonly #input: (rows: Rows) => string
  #parts: Parts | undefined
  #name: string | undefined

  /** @param input - declares rows of one piece of the weight as an input of the graph and returns its name */
  constructor(onnx: OnnxBuilder, type: WeightType, storage: WeightStorage, input: (rows: Rows) => string) {
    this.dtype = type.dtype
    this.shape = type.shape
    this.#onnx = onnx
    this.#storage = storage
    this.#input = input
  }

  /** Its tiles. */
  get parts(): Parts {
    this.#parts ??= this.#onnx.early(() => ({
      dim: 0,
      parts: tilesOf(this.shape, this.#storage, this.#onnx.target.castBytes).map((tile) => this.#castTile(tile)),
    }))
    return this.#parts
  }

  get name(): string {
    this.#name ??= this.#onnx.early(() => join(this.#onnx, this.parts))
    return this.#name
  }

  get storedDType(): WeightDType {
    return this.#storage.dtype
  }

  get stored(): StoredParts {
    return this.storedTiles(rowsOf(this.shape))
  }

  storedTiles(most: number): StoredParts {
    const { dtype, pieces } = this.#storage
    const tiles = rowsOfPieces(pieces).flatMap((rows) => cutEvenly(rows, most))
    return { dtype, dim: 0, parts: tiles.map((rows) => this.#inputPart(rows)) }
  }

  #castTile(tile: Tile): Part {
    const parts = tile.map((rows) => {
      const { name, size } = this.#inputPart(rows)
      return { name: this.#cast(name), size }
    })
    return { name: join(this.#onnx, { dim: 0, parts }), size: parts.reduce((sum, { size }) => sum + size, 0) }
  }

  /** Stored elements as they are computed with. */
  #cast(name: string): string {
    const { dtype } = this.#storage
    const cast = toFloat32(this.#onnx, name, dtype)
    return this.dtype === 'bfloat16' && dtype !== 'bfloat16' ? roundToBfloat16(this.#onnx, cast) : cast
  }

  #inputPart(rows: Rows): Part {
    return { name: this.#input(rows), size: rows.end - rows.start }
  }
}

/** The name of the value that the parts make up. */
export function join(onnx: OnnxBuilder, { dim, parts }: Parts): string {
  const names = parts.map(({ name }) => name)
  return names.length === 1 ? (names[0] as string) : onnx.op('Concat', names, { axis: { i: dim } })
}

/**
 * Stored elements as float32, exactly. The Node binding of ORT takes no bfloat16 and, where JavaScript has Float16Array,
 * float16 only as such, so both may come as uint16.
 */
export function toFloat32(onnx: OnnxBuilder, name: string, dtype: WeightDType): string {
  if (dtype === 'float32') return name
  const halves =
    onnx.target.halfInputs === 'floats' ? name : onnx.op('BitCast', [name], { to: { i: ELEMENT_TYPES[dtype] } })
  return onnx.op('Cast', [halves], { to: { i: ELEMENT_TYPES.float32 } })
}

function rowsOfPieces(pieces: readonly number[]): readonly Rows[] {
  let end = 0
  return pieces.map((count) => {
    const start = end
    end += count
    return { start, end }
  })
}

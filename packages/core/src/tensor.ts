import { allocate, castData, type DType, type DTypeArrays, itemSize } from './dtype.ts'
import { RankwiseError } from './errors.ts'

/** Sizes of the dimensions, outermost first; empty for a scalar. */
export type Shape = readonly number[]

/** Number of elements of a shape; 1 for a scalar. */
export function sizeOf(shape: Shape): number {
  return shape.reduce((product, size) => product * size, 1)
}

/** Bytes that a contiguous tensor of this shape and dtype takes. */
export function byteSizeOf(shape: Shape, dtype: DType): number {
  return sizeOf(shape) * itemSize(dtype)
}

/** Whether two shapes have the same sizes. */
export function sameShape(a: Shape, b: Shape): boolean {
  return a.length === b.length && a.every((size, i) => size === b[i])
}

/** A dense, contiguous, row-major tensor in host memory. */
export class Tensor<D extends DType = DType> {
  readonly dtype: D
  readonly shape: Shape
  readonly data: DTypeArrays[D]

  /** @throws RankwiseError `TENSOR_SHAPE` when `data` does not hold exactly as many elements as `shape`. */
  constructor(dtype: D, shape: Shape, data: DTypeArrays[D]) {
    if (data.length !== sizeOf(shape)) {
      throw new RankwiseError('TENSOR_SHAPE', 'data does not fit the shape', {
        actual: { elements: data.length, shape },
        rule: 'data.length is the product of the shape',
      })
    }
    this.dtype = dtype
    this.shape = shape
    this.data = data
  }

  /** A tensor of zeros. */
  static zeros<D extends DType>(dtype: D, shape: Shape): Tensor<D> {
    return new Tensor(dtype, shape, allocate(dtype, sizeOf(shape)))
  }

  /** A float32 tensor; a `Float32Array` is taken over, not copied. @throws RankwiseError `TENSOR_SHAPE` */
  static float32(shape: Shape, data: Float32Array | readonly number[]): Tensor<'float32'> {
    return new Tensor('float32', shape, data instanceof Float32Array ? data : Float32Array.from(data))
  }

  /** An int32 tensor; an `Int32Array` is taken over, not copied. @throws RankwiseError `TENSOR_SHAPE` */
  static int32(shape: Shape, data: Int32Array | readonly number[]): Tensor<'int32'> {
    return new Tensor('int32', shape, data instanceof Int32Array ? data : Int32Array.from(data))
  }

  get byteLength(): number {
    return this.data.byteLength
  }

  /** The tensor in another dtype; itself when it already has it. */
  cast<T extends DType>(dtype: T): Tensor<T> {
    if ((this.dtype as DType) === dtype) return this as unknown as Tensor<T>
    return new Tensor(dtype, this.shape, castData(this.data, this.dtype, dtype))
  }

  /** The same elements under another shape; shares the data. */
  reshape(shape: Shape): Tensor<D> {
    return new Tensor(this.dtype, shape, this.data)
  }

  /** A copy with data of its own. */
  clone(): Tensor<D> {
    return new Tensor(this.dtype, this.shape, this.data.slice() as DTypeArrays[D])
  }
}

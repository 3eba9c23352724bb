import type { DType } from '../dtype.ts'
import { type Shape, Tensor } from '../tensor.ts'
import type { Float64Tensor } from './kernel.ts'
import { offsetsOf } from './strides.ts'

export function add(_attributes: object, a: Float64Tensor, b: Float64Tensor): readonly Float64Tensor[] {
  return [broadcast(a, b, (x, y) => x + y)]
}

export function sub(_attributes: object, a: Float64Tensor, b: Float64Tensor): readonly Float64Tensor[] {
  return [broadcast(a, b, (x, y) => x - y)]
}

export function mul(_attributes: object, a: Float64Tensor, b: Float64Tensor): readonly Float64Tensor[] {
  return [broadcast(a, b, (x, y) => x * y)]
}

export function div(_attributes: object, a: Float64Tensor, b: Float64Tensor): readonly Float64Tensor[] {
  return [broadcast(a, b, (x, y) => x / y)]
}

export function addScalar({ value }: { readonly value: number }, x: Float64Tensor): readonly Float64Tensor[] {
  return [map(x, (element) => element + value)]
}

export function mulScalar({ value }: { readonly value: number }, x: Float64Tensor): readonly Float64Tensor[] {
  return [map(x, (element) => element * value)]
}

/** `x * sigmoid(x)`. */
export function silu(_attributes: object, x: Float64Tensor): readonly Float64Tensor[] {
  return [map(x, (element) => element / (1 + Math.exp(-element)))]
}

export function sin(_attributes: object, x: Float64Tensor): readonly Float64Tensor[] {
  return [map(x, Math.sin)]
}

export function cos(_attributes: object, x: Float64Tensor): readonly Float64Tensor[] {
  return [map(x, Math.cos)]
}

/** Values of float64 that `dtype` has. */
export function cast({ dtype }: { readonly dtype: DType }, x: Float64Tensor): readonly Float64Tensor[] {
  return [dtype === 'float64' ? x.clone() : x.cast(dtype).cast('float64')]
}

function map(x: Float64Tensor, f: (element: number) => number): Float64Tensor {
  return new Tensor(
    'float64',
    x.shape,
    x.data.map((element) => f(element)),
  )
}

/** NumPy broadcasting: shapes are aligned from the right, and a dimension of size 1 is repeated. */
function broadcast(a: Float64Tensor, b: Float64Tensor, f: (x: number, y: number) => number): Float64Tensor {
  const rank = Math.max(a.shape.length, b.shape.length)
  const [shapeA, shapeB] = [padded(a.shape, rank), padded(b.shape, rank)]
  const result = Tensor.zeros(
    'float64',
    shapeA.map((size, dim) => (size === 1 ? (shapeB[dim] as number) : size)),
  )
  const [offsetsA, offsetsB] = [repeatedOffsets(shapeA, result.shape), repeatedOffsets(shapeB, result.shape)]
  for (let i = 0; i < result.data.length; i++) {
    result.data[i] = f(a.data[offsetsA[i] as number] as number, b.data[offsetsB[i] as number] as number)
  }
  return result
}

function padded(shape: Shape, rank: number): Shape {
  return [...new Array<number>(rank - shape.length).fill(1), ...shape]
}

/** Where every element of the result reads an operand of `shape`: a repeated dimension has stride 0. */
function repeatedOffsets(shape: Shape, result: Shape): Int32Array {
  let stride = 1
  const strides = new Array<number>(shape.length)
  for (let dim = shape.length - 1; dim >= 0; dim--) {
    strides[dim] = shape[dim] === 1 ? 0 : stride
    stride *= shape[dim] as number
  }
  return offsetsOf(result, strides)
}

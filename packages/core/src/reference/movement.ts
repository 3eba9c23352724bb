import { type Shape, sizeOf, Tensor } from '../tensor.ts'
import type { Float64Tensor } from './kernel.ts'
import { offsetsOf, stridesOf } from './strides.ts'

export function reshape({ shape }: { readonly shape: Shape }, x: Float64Tensor): readonly Float64Tensor[] {
  return [new Tensor('float64', shape, x.data.slice())]
}

/** Dimension `i` of the result is dimension `permutation[i]` of x. */
export function transpose(
  { permutation }: { readonly permutation: readonly number[] },
  x: Float64Tensor,
): readonly Float64Tensor[] {
  const strides = stridesOf(x.shape)
  const shape = permutation.map((dim) => x.shape[dim] as number)
  const offsets = offsetsOf(
    shape,
    permutation.map((dim) => strides[dim] as number),
  )
  return [
    new Tensor(
      'float64',
      shape,
      Float64Array.from(offsets, (offset) => x.data[offset] as number),
    ),
  ]
}

export function split(
  { dim, sizes }: { readonly dim: number; readonly sizes: readonly number[] },
  x: Float64Tensor,
): readonly Float64Tensor[] {
  let start = 0
  return sizes.map((size) => {
    const piece = sliceAlong(x, dim, start, start + size)
    start += size
    return piece
  })
}

export function concat({ dim }: { readonly dim: number }, ...inputs: Float64Tensor[]): readonly Float64Tensor[] {
  return [join(inputs, dim)]
}

type ShardAttributes = { readonly dim: number; readonly starts?: readonly number[]; readonly ends?: readonly number[] }

/** The ranges `starts`/`ends` along `dim`, joined; without them, as in a graph that is not split, all of x. */
export function shard({ dim, starts, ends }: ShardAttributes, x: Float64Tensor): readonly Float64Tensor[] {
  if (starts === undefined || ends === undefined) return [x.clone()]
  const pieces = starts.map((start, i) => sliceAlong(x, dim, start, ends[i] as number))
  return [join(pieces, dim)]
}

/** Elements `start` to `end` (exclusive) along a dimension. */
export function sliceAlong(x: Float64Tensor, dim: number, start: number, end: number): Float64Tensor {
  const inner = sizeOf(x.shape.slice(dim + 1))
  const [row, length] = [(x.shape[dim] as number) * inner, (end - start) * inner]
  const result = Tensor.zeros(
    'float64',
    x.shape.map((size, i) => (i === dim ? end - start : size)),
  )
  for (let outer = 0; outer < sizeOf(x.shape.slice(0, dim)); outer++) {
    const from = outer * row + start * inner
    result.data.set(x.data.subarray(from, from + length), outer * length)
  }
  return result
}

/** Tensors that agree in all other dimensions, one after the other along `dim`. */
export function join(tensors: readonly Float64Tensor[], dim: number): Float64Tensor {
  const shape = (tensors[0] as Float64Tensor).shape
  const joined = tensors.reduce((sum, tensor) => sum + (tensor.shape[dim] as number), 0)
  const result = Tensor.zeros(
    'float64',
    shape.map((size, i) => (i === dim ? joined : size)),
  )
  const inner = sizeOf(shape.slice(dim + 1))
  let to = 0
  for (let outer = 0; outer < sizeOf(shape.slice(0, dim)); outer++) {
    for (const tensor of tensors) {
      const row = (tensor.shape[dim] as number) * inner
      result.data.set(tensor.data.subarray(outer * row, (outer + 1) * row), to)
      to += row
    }
  }
  return result
}

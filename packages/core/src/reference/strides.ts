import { type Shape, sizeOf } from '../tensor.ts'

/** Distance between neighbours along every dimension of a contiguous, row-major tensor. */
export function stridesOf(shape: Shape): readonly number[] {
  return shape.map((_, dim) => sizeOf(shape.slice(dim + 1)))
}

/** The offset `index · strides` of every index of `shape`, in row-major order. */
export function offsetsOf(shape: Shape, strides: readonly number[]): Int32Array {
  const offsets = new Int32Array(sizeOf(shape))
  // Filled dimension by dimension: the offsets of the first k dimensions are the starts of those of the first k + 1.
  let filled = 1
  for (const [dim, size] of shape.entries()) {
    const stride = strides[dim] as number
    for (let i = filled - 1; i >= 0; i--) {
      const start = offsets[i] as number
      for (let j = size - 1; j >= 0; j--) offsets[i * size + j] = start + j * stride
    }
    filled *= size
  }
  return offsets
}

import { Tensor } from '../tensor.ts'
import type { Float64Tensor } from './kernel.ts'

type Conv2dAttributes = { readonly stride: number; readonly padding: readonly number[] }
type Shape4 = readonly [number, number, number, number]

/**
 * Cross-correlation of x `[batch, in, height, width]` with weight `[out, in, kh, kw]`, plus bias `[out]`; `padding` is
 * zeros on [top, bottom, left, right].
 */
export function conv2d(
  { stride, padding }: Conv2dAttributes,
  x: Float64Tensor,
  weight: Float64Tensor,
  bias: Float64Tensor,
): readonly Float64Tensor[] {
  const [batch, channels, height, width] = x.shape as Shape4
  const [out, , kernelHeight, kernelWidth] = weight.shape as Shape4
  const [top, bottom, left, right] = padding as Shape4
  const rows = Math.floor((height + top + bottom - kernelHeight) / stride) + 1
  const columns = Math.floor((width + left + right - kernelWidth) / stride) + 1
  const result = Tensor.zeros('float64', [batch, out, rows, columns])
  for (let b = 0; b < batch; b++) {
    for (let o = 0; o < out; o++) {
      const sum = planeOf(result, b * out + o)
      sum.data.fill(bias.data[o] as number)
      for (let c = 0; c < channels; c++) {
        correlate(planeOf(x, b * channels + c), planeOf(weight, o * channels + c), sum, { stride, top, left })
      }
    }
  }
  return [result]
}

interface Plane {
  readonly data: Float64Array
  readonly rows: number
  readonly columns: number
}

/** The `index`-th plane of a tensor `[.., .., rows, columns]`; a view. */
function planeOf({ data, shape }: Float64Tensor, index: number): Plane {
  const [, , rows, columns] = shape as Shape4
  return { data: data.subarray(index * rows * columns, (index + 1) * rows * columns), rows, columns }
}

/** Adds the correlation of one channel with one kernel to `sum`; `top` and `left` are zeros around the image. */
function correlate(
  image: Plane,
  kernel: Plane,
  sum: Plane,
  { stride, top, left }: { readonly stride: number; readonly top: number; readonly left: number },
): void {
  for (let i = 0; i < kernel.rows; i++) {
    for (let j = 0; j < kernel.columns; j++) {
      const rows = inside(sum.rows, image.rows, stride, i - top)
      const columns = inside(sum.columns, image.columns, stride, j - left)
      const scale = kernel.data[i * kernel.columns + j] as number
      for (let row = rows.start; row < rows.end; row++) {
        const source = (row * stride + i - top) * image.columns + j - left
        const target = row * sum.columns
        for (let column = columns.start; column < columns.end; column++) {
          const value = image.data[source + column * stride] as number
          sum.data[target + column] = (sum.data[target + column] as number) + scale * value
        }
      }
    }
  }
}

/** The output positions p of `length` whose source `p * stride + shift` lies inside an image of `size`. */
function inside(length: number, size: number, stride: number, shift: number): { start: number; end: number } {
  const start = Math.max(0, Math.ceil(-shift / stride))
  return { start, end: Math.min(length, Math.floor((size - 1 - shift) / stride) + 1) }
}

/** Repeats every pixel of x `[batch, channels, height, width]` `scale` times in both directions. */
export function upsampleNearest2d({ scale }: { readonly scale: number }, x: Float64Tensor): readonly Float64Tensor[] {
  const [batch, channels, height, width] = x.shape as Shape4
  const [rows, columns] = [height * scale, width * scale]
  const result = Tensor.zeros('float64', [batch, channels, rows, columns])
  for (let plane = 0; plane < batch * channels; plane++) {
    for (let i = 0; i < rows * columns; i++) {
      const [row, column] = [Math.floor(i / columns / scale), Math.floor((i % columns) / scale)]
      result.data[plane * rows * columns + i] = x.data[(plane * height + row) * width + column] as number
    }
  }
  return [result]
}

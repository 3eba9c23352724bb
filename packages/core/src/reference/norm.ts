import { Tensor } from '../tensor.ts'
import type { Float64Tensor } from './kernel.ts'
import { dot } from './linear.ts'

/** `(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension, with the biased variance. */
export function layerNorm(
  { eps }: { readonly eps: number },
  x: Float64Tensor,
  weight?: Float64Tensor,
  bias?: Float64Tensor,
): readonly Float64Tensor[] {
  const width = x.shape.at(-1) as number
  const result = x.clone()
  for (const row of rowsOf(result.data, width)) standardize(row, eps)
  return [affine(result, perFeature(weight, width, 1), perFeature(bias, width, 0))]
}

/** `x / sqrt(mean(x²) + eps) * weight` over the last dimension. */
export function rmsNorm(
  { eps }: { readonly eps: number },
  x: Float64Tensor,
  weight?: Float64Tensor,
): readonly Float64Tensor[] {
  const width = x.shape.at(-1) as number
  const result = x.clone()
  for (const row of rowsOf(result.data, width)) {
    scaleBy(row, 1 / Math.sqrt(dot(row, 0, row, 0, width) / width + eps))
  }
  return [affine(result, perFeature(weight, width, 1), () => 0)]
}

/**
 * x `[batch, channels, height, width]` standardised over the channels of a group and all its pixels, then scaled and
 * shifted per channel.
 */
export function groupNorm(
  { groups, eps }: { readonly groups: number; readonly eps: number },
  x: Float64Tensor,
  weight: Float64Tensor,
  bias: Float64Tensor,
): readonly Float64Tensor[] {
  const [, channels, height, width] = x.shape as readonly [number, number, number, number]
  const pixels = height * width
  const group = (channels / groups) * pixels
  const result = x.clone()
  for (const row of rowsOf(result.data, group)) standardize(row, eps)
  const channelOf = (i: number) => Math.floor(i / pixels) % channels
  return [
    affine(
      result,
      (i) => weight.data[channelOf(i)] as number,
      (i) => bias.data[channelOf(i)] as number,
    ),
  ]
}

/** The element of an optional weight that belongs to element i of a tensor whose last dimension is `width`. */
function perFeature(weight: Float64Tensor | undefined, width: number, absent: number): (i: number) => number {
  return (i) => weight?.data[i % width] ?? absent
}

/** Views of consecutive runs of `width` elements. */
function* rowsOf(data: Float64Array, width: number): IterableIterator<Float64Array> {
  for (let start = 0; start < data.length; start += width) yield data.subarray(start, start + width)
}

/** In place: mean 0 and variance 1, but for eps. */
function standardize(row: Float64Array, eps: number): void {
  const mean = row.reduce((sum, value) => sum + value, 0) / row.length
  for (let i = 0; i < row.length; i++) row[i] = (row[i] as number) - mean
  scaleBy(row, 1 / Math.sqrt(dot(row, 0, row, 0, row.length) / row.length + eps))
}

function scaleBy(row: Float64Array, scale: number): void {
  for (let i = 0; i < row.length; i++) row[i] = (row[i] as number) * scale
}

/** `x[i] * scale(i) + shift(i)`. */
function affine(x: Float64Tensor, scale: (i: number) => number, shift: (i: number) => number): Float64Tensor {
  const data = x.data.map((value, i) => value * scale(i) + shift(i))
  return new Tensor('float64', x.shape, data)
}

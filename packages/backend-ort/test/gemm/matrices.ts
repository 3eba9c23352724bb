import { bfloat16ToFloat32, float32ToBfloat16 } from '@rankwise/core'
import type { GemmLibrary, Placement, Sizes } from './library.ts'

// What the kernels sum on its own: DEPTH in native/gemm-kernel.c.
const DEPTH = 256
const ROUNDING = 2 ** -24
const UNTOUCHED = -12345.5

export interface Matrices {
  readonly sizes: Sizes
  /** float32, and NaN between the rows. */
  readonly x: Float32Array
  /** Bits of bfloat16, and NaN between the rows. */
  readonly w: Uint16Array
}

/** Numbers of a row-major matrix, including what lies between its rows, but nothing behind the last. */
function extent(rows: number, columns: number, stride: number): number {
  return rows === 0 ? 0 : (rows - 1) * stride + columns
}

/** Rows without anything between them. */
export function dense(m: number, n: number, k: number): Sizes {
  return { m, n, k, xStride: k, wStride: k, yStride: n }
}

/** Fills x and w from functions of their row and their element of k. */
export function matrices(
  sizes: Sizes,
  x: (row: number, p: number) => number,
  w: (row: number, p: number) => number,
): Matrices {
  const { m, n, k, xStride, wStride } = sizes
  const filled = {
    sizes,
    x: new Float32Array(extent(m, k, xStride)).fill(Number.NaN),
    w: new Uint16Array(extent(n, k, wStride)).fill(0x7fc0),
  }
  for (let i = 0; i < m; i++) for (let p = 0; p < k; p++) filled.x[i * xStride + p] = x(i, p)
  for (let j = 0; j < n; j++) for (let p = 0; p < k; p++) filled.w[j * wStride + p] = float32ToBfloat16(w(j, p))
  return filled
}

/** Of about the distribution that activations and weights have. */
export function randomMatrices(sizes: Sizes, seed: number): Matrices {
  const random = normal(seed)
  return matrices(sizes, random, () => random() / 64)
}

/** Sums of 12 evenly distributed numbers (xorshift32): close to a normal distribution. */
function normal(seed: number): () => number {
  let state = (seed * 2654435761) | 1
  const next = () => {
    state ^= state << 13
    state ^= state >>> 17
    state ^= state << 5
    return (state >>> 0) / 2 ** 32
  }
  return () => {
    let sum = -6
    for (let i = 0; i < 12; i++) sum += next()
    return sum
  }
}

/** y as the kernel writes it; throws what went wrong. */
export function product(
  library: GemmLibrary,
  variant: string,
  { sizes, x, w }: Matrices,
  placement?: Placement,
): Float32Array {
  const y = new Float32Array(extent(sizes.m, sizes.n, sizes.yStride)).fill(UNTOUCHED)
  const failure = library.multiply(variant, sizes, x, w, y, placement)
  if (failure !== undefined) throw new Error(`${variant}: ${failure}`)
  return y
}

/** Where y is wrong: compared with a computation in float64, within what rounding every step of a sum may add up to. */
export function wrongElement(y: Float32Array, given: Matrices): string | undefined {
  const { m, n, k, yStride } = given.sizes
  const steps = Math.min(k, DEPTH) + Math.ceil(k / DEPTH) + 1
  for (let i = 0; i < m; i++) {
    for (let j = 0; j < n; j++) {
      const { sum, magnitude } = exact(given, i, j)
      const actual = y[i * yStride + j] as number
      const tolerance = steps * (ROUNDING * magnitude + 2 ** -149)
      if (!(Math.abs(actual - sum) <= tolerance)) return `y[${i}, ${j}] is ${actual}, not ${sum} +- ${tolerance}`
    }
    for (let j = n; j < yStride && i < m - 1; j++) {
      if (y[i * yStride + j] !== UNTOUCHED) return `y is written beyond the ${n} columns of row ${i}`
    }
  }
  return undefined
}

/** In float64, which products of a float32 and a bfloat16 fit into. */
export function exact({ sizes, x, w }: Matrices, row: number, column: number): { sum: number; magnitude: number } {
  let sum = 0
  let magnitude = 0
  const xStart = row * sizes.xStride
  const wStart = column * sizes.wStride
  for (let p = 0; p < sizes.k; p++) {
    const term = (x[xStart + p] as number) * (WIDE[w[wStart + p] as number] as number)
    sum += term
    magnitude += Math.abs(term)
  }
  return { sum, magnitude }
}

const WIDE = Float64Array.from({ length: 2 ** 16 }, (_, bits) => bfloat16ToFloat32(bits))

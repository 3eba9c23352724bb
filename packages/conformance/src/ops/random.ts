import { type Shape, sizeOf, Tensor } from '@rankwise/core'

/** Mean and standard deviation of normally distributed numbers. */
export interface Spread {
  /** @default 0 */
  readonly mean?: number
  /** @default 1 */
  readonly deviation?: number
}

/** Uniform numbers in (0, 1] from a seed (a linear congruential generator modulo 2^32), so that failures repeat. */
function uniform(seed: number): () => number {
  let state = (seed * 2654435761) >>> 0
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0
    return (state + 1) / 2 ** 32
  }
}

/** Normally distributed float32 numbers, the same for the same seed. */
export function normal(shape: Shape, seed: number, { mean = 0, deviation = 1 }: Spread = {}): Tensor<'float32'> {
  const next = uniform(seed)
  const sample = () => mean + deviation * Math.sqrt(-2 * Math.log(next())) * Math.cos(2 * Math.PI * next())
  return Tensor.float32(shape, Float32Array.from({ length: sizeOf(shape) }, sample))
}

/** Uniform float32 numbers between two bounds, the same for the same seed. */
export function between(low: number, high: number, shape: Shape, seed: number): Tensor<'float32'> {
  const next = uniform(seed)
  return Tensor.float32(
    shape,
    Float32Array.from({ length: sizeOf(shape) }, () => low + (high - low) * next()),
  )
}

/** The tables of a rotary embedding, float32 `[tokens, width]`. */
export function rotation(tokens: number, width: number): { readonly cos: Tensor; readonly sin: Tensor } {
  const angles = Float64Array.from({ length: tokens * width }, (_, i) => {
    return Math.floor(i / width) / 2000 ** ((i % width) / width)
  })
  const table = (f: (angle: number) => number) => Tensor.float32([tokens, width], Float32Array.from(angles, f))
  return { cos: table(Math.cos), sin: table(Math.sin) }
}

import { type Shape, sizeOf, Tensor } from '@rankwise/core'

/** Mean and standard deviation. */
export interface Spread {
  readonly mean: number
  readonly deviation: number
}

/**
 * Uniform numbers, rounded to bfloat16: whoever computes in it and whoever does not begin from the same. The same for the
 * same name, in any order of calls.
 */
export function randomTensor(name: string, shape: Shape, { mean, deviation }: Spread): Tensor<'bfloat16'> {
  const width = deviation * Math.sqrt(12)
  const data = new Float32Array(sizeOf(shape))
  let state = seedOf(name)
  for (let i = 0; i < data.length; i++) {
    // xorshift32 (Marsaglia 2003): a linear congruential generator modulo 2^32 repeats its low bits along rows.
    state ^= state << 13
    state ^= state >>> 17
    state ^= state << 5
    data[i] = mean + width * ((state >>> 0) / 2 ** 32 - 0.5)
  }
  return Tensor.float32(shape, data).cast('bfloat16')
}

/** FNV-1a, without the one state that xorshift does not leave. */
function seedOf(name: string): number {
  let hash = 0x811c9dc5
  for (const byte of Buffer.from(name)) hash = Math.imul(hash ^ byte, 0x01000193)
  return hash === 0 ? 1 : hash
}

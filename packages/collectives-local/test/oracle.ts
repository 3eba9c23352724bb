import { type DType, itemSize, viewAs } from '@rankwise/core'

// From the source: the package has it for its own checks, and its entry needs vitest, without which ranks run.
export { reduceInOrder } from '../../conformance/src/collectives/oracle.ts'

/** Index of the first element that differs in any bit: the kernels agree on NaN as well. */
export function firstDifference(dtype: DType, actual: Uint8Array, expected: Uint8Array): number | undefined {
  if (Buffer.compare(actual, expected) === 0) return undefined
  const length = Math.min(actual.length, expected.length)
  let byte = 0
  while (byte < length && actual[byte] === expected[byte]) byte++
  return Math.floor(byte / itemSize(dtype))
}

/** Small and large, exact and inexact, with every special value now and then; the same for the same seed. */
export function randomBytes(dtype: DType, elements: number, seed: number): Uint8Array {
  const next = xorshift(seed)
  const bytes = new Uint8Array(elements * itemSize(dtype))
  const array = viewAs(dtype, bytes)
  if (array instanceof Float32Array || array instanceof Float64Array) {
    for (let i = 0; i < elements; i++) array[i] = randomNumber(next)
  } else if (dtype === 'bool') {
    for (let i = 0; i < elements; i++) bytes[i] = next() & 1
  } else {
    for (let i = 0; i < bytes.length; i++) bytes[i] = next()
  }
  return bytes
}

const SPECIAL = [0, -0, 1, -1, Number.NaN, Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY, 1e-42, 3e38, 65504]

function randomNumber(next: () => number): number {
  if (next() % 16 === 0) return SPECIAL[(next() >>> 0) % SPECIAL.length] as number
  return (next() / 2 ** 31) * 2 ** (next() % 20)
}

export function xorshift(seed: number): () => number {
  let state = Math.imul(seed + 1, 0x9e3779b1) | 1
  return () => {
    state ^= state << 13
    state ^= state >>> 17
    state ^= state << 5
    return state
  }
}

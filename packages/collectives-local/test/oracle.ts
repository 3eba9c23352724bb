import {
  bfloat16ToFloat32,
  type DType,
  float16ToFloat32,
  float32ToBfloat16,
  float32ToFloat16,
  itemSize,
  type ReduceOp,
  type TensorData,
  viewAs,
} from '@rankwise/core'

/** How the elements of a dtype are combined, written as plainly as it can be said. */
interface Arithmetic {
  /** The number that an element stands for. */
  read(element: number): number
  /** Rounds an intermediate result. */
  round(value: number): number
  /** The element that a result becomes. */
  write(value: number): number
}

const ARITHMETIC: Partial<Record<DType, Arithmetic>> = {
  float64: { read: (x) => x, round: (x) => x, write: (x) => x },
  float32: { read: (x) => x, round: Math.fround, write: (x) => x },
  int32: { read: (x) => x, round: (x) => x | 0, write: (x) => x },
  bfloat16: { read: bfloat16ToFloat32, round: Math.fround, write: float32ToBfloat16 },
  float16: { read: float16ToFloat32, round: Math.fround, write: float32ToFloat16 },
}

const COMBINE: Record<ReduceOp, (a: number, b: number) => number> = {
  sum: (a, b) => a + b,
  max: Math.max,
  min: Math.min,
}

/** Reduces the contributions element by element, in the order given. */
export function reduceSequentially(dtype: DType, op: ReduceOp, contributions: readonly Uint8Array[]): Uint8Array {
  // One rank alone keeps what it has, whatever NaN that is.
  if (contributions.length === 1) return contributions[0] as Uint8Array
  const { read, round, write } = ARITHMETIC[dtype] as Arithmetic
  const arrays = contributions.map((bytes) => viewAs(dtype, bytes))
  const result = viewAs(dtype, new Uint8Array((contributions[0] as Uint8Array).length)) as Float64Array
  const [first, ...rest] = arrays as [TensorData, ...TensorData[]]
  for (let i = 0; i < result.length; i++) {
    let combined = read(first[i] as number)
    for (const array of rest) combined = round(COMBINE[op](combined, read(array[i] as number)))
    // Every kernel writes the same NaN: the one without sign and payload.
    result[i] = write(Number.isNaN(combined) ? Number.NaN : combined)
  }
  return new Uint8Array(result.buffer)
}

/** Index of the first element that differs in any bit. */
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

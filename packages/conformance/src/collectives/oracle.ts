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

/** Dtypes that every collectives package reduces. */
export const REDUCIBLE: readonly DType[] = ['float32', 'float64', 'float16', 'bfloat16', 'int32']

const COMBINE: Record<ReduceOp, (a: number, b: number) => number> = {
  sum: (a, b) => a + b,
  max: Math.max,
  min: Math.min,
}

/**
 * Reduces the contributions element by element, in the order given; 16-bit floats are added in float32. A NaN that comes of
 * it is the one without sign and payload; one rank alone keeps what it has.
 */
export function reduceInOrder(dtype: DType, op: ReduceOp, contributions: readonly Uint8Array[]): Uint8Array {
  if (contributions.length === 1) return new Uint8Array(contributions[0] as Uint8Array)
  const { read, round, write } = ARITHMETIC[dtype] as Arithmetic
  const arrays = contributions.map((bytes) => viewAs(dtype, bytes))
  const result = viewAs(dtype, new Uint8Array((contributions[0] as Uint8Array).length)) as Float64Array
  const [first, ...rest] = arrays as [TensorData, ...TensorData[]]
  for (let i = 0; i < result.length; i++) {
    let combined = read(first[i] as number)
    for (const array of rest) combined = round(COMBINE[op](combined, read(array[i] as number)))
    result[i] = write(Number.isNaN(combined) ? Number.NaN : combined)
  }
  return new Uint8Array(result.buffer)
}

/** Index of the first element that differs; any NaN equals any other, everything else is compared bit by bit. */
export function firstDifference(dtype: DType, actual: Uint8Array, expected: Uint8Array): number | undefined {
  if (actual.length !== expected.length) return Math.min(actual.length, expected.length) / itemSize(dtype)
  const [a, b] = [viewAs(dtype, actual), viewAs(dtype, expected)]
  for (let i = 0; i < a.length; i++) {
    if (!sameElement(dtype, a[i] as number, b[i] as number)) return i
  }
  return undefined
}

function sameElement(dtype: DType, a: number, b: number): boolean {
  if (Object.is(a, b)) return true
  if (dtype === 'bfloat16' || dtype === 'float16') {
    const { read } = ARITHMETIC[dtype] as Arithmetic
    return Number.isNaN(read(a)) && Number.isNaN(read(b))
  }
  return false
}

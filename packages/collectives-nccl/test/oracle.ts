import {
  bfloat16ToFloat32,
  type DType,
  float16ToFloat32,
  float32ToBfloat16,
  float32ToFloat16,
  itemSize,
  type ReduceOp,
  viewAs,
} from '@rankwise/core'

type Element = number | bigint

/** The number that an element stands for, how a result is rounded, and the element that it becomes. */
interface Arithmetic {
  read(element: Element): Element
  write(value: Element): Element
}

const exact: Arithmetic = { read: (x) => x, write: (x) => x }
const ARITHMETIC: Partial<Record<DType, Arithmetic>> = {
  float64: exact,
  float32: { read: (x) => x, write: (x) => Math.fround(Number(x)) },
  // A typed array wraps around by itself when it is written to.
  int8: exact,
  uint8: exact,
  int32: exact,
  int64: exact,
  float16: { read: (x) => float16ToFloat32(Number(x)), write: (x) => float32ToFloat16(Number(x)) },
  bfloat16: { read: (x) => bfloat16ToFloat32(Number(x)), write: (x) => float32ToBfloat16(Number(x)) },
}

/** Dtypes that NCCL reduces, written down here once more: the package must not decide what is tested. */
export const REDUCIBLE = Object.keys(ARITHMETIC) as DType[]

/** Reduces element by element in the order given, as the stub does. */
export function reduceSequentially(dtype: DType, op: ReduceOp, contributions: readonly Uint8Array[]): Uint8Array {
  const { read, write } = ARITHMETIC[dtype] as Arithmetic
  const inFloat32 = dtype === 'float32' || dtype === 'float16' || dtype === 'bfloat16'
  const arrays = contributions.map((bytes) => viewAs(dtype, bytes) as ArrayLike<Element>)
  const result = viewAs(dtype, new Uint8Array((contributions[0] as Uint8Array).length)) as { [i: number]: Element }
  for (let i = 0; i < (arrays[0] as ArrayLike<Element>).length; i++) {
    const elements = arrays.map((array) => read(array[i] as Element))
    const combined = elements.reduce((a, b) => {
      const value = combine(op, a, b)
      return inFloat32 ? Math.fround(Number(value)) : value
    })
    result[i] = write(combined)
  }
  return new Uint8Array((result as unknown as Uint8Array).buffer)
}

function combine(op: ReduceOp, a: Element, b: Element): Element {
  if (typeof a === 'bigint' || typeof b === 'bigint') {
    const [x, y] = [BigInt(a), BigInt(b)]
    if (op === 'sum') return BigInt.asIntN(64, x + y)
    return x > y === (op === 'max') ? x : y
  }
  if (op === 'sum') return a + b
  return op === 'max' ? Math.max(a, b) : Math.min(a, b)
}

/** Index of the first element that differs; any NaN equals any other, everything else is compared bit by bit. */
export function firstDifference(dtype: DType, actual: Uint8Array, expected: Uint8Array): number | undefined {
  if (actual.length !== expected.length) return Math.min(actual.length, expected.length) / itemSize(dtype)
  const [a, b] = [actual, expected].map((bytes) => viewAs(dtype, bytes) as ArrayLike<Element>)
  const { read } = ARITHMETIC[dtype] ?? exact
  const length = actual.length / itemSize(dtype)
  for (let i = 0; i < length; i++) {
    const [x, y] = [a?.[i] as Element, b?.[i] as Element]
    if (!Object.is(x, y) && !(Number.isNaN(Number(read(x))) && Number.isNaN(Number(read(y))))) return i
  }
  return undefined
}

/** Bytes that are different for every seed; floats of every size, with special values now and then. */
export function randomBytes(dtype: DType, elements: number, seed: number): Uint8Array {
  const next = xorshift(seed)
  const bytes = new Uint8Array(elements * itemSize(dtype))
  const array = viewAs(dtype, bytes)
  if (array instanceof Float32Array || array instanceof Float64Array) {
    for (let i = 0; i < elements; i++) array[i] = randomNumber(next)
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

function xorshift(seed: number): () => number {
  let state = Math.imul(seed + 1, 0x9e3779b1) | 1
  return () => {
    state ^= state << 13
    state ^= state >>> 17
    state ^= state << 5
    return state
  }
}

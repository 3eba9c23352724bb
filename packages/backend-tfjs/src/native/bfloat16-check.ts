import type { Engine, Ref } from '../engine.ts'

/** Bits of small integers in bfloat16, which has 8 of them: exact, and so are sums up to 256. */
const BITS = new Map([
  [-1, 0xbf80],
  [0, 0],
  [1, 0x3f80],
  [2, 0x4000],
  [3, 0x4040],
])
const VALUES = [...BITS.keys()]

/** float32 and what it is in bfloat16: the two ties to even, and numbers just beside a tie. */
const ROUNDED: readonly (readonly [number, number])[] = [
  [1 + 2 ** -8, 1],
  [1 + 3 * 2 ** -8, 1 + 2 ** -6],
  [-1 - 2 ** -8 - 2 ** -20, -1 - 2 ** -7],
  [1 + 3 * 2 ** -8 - 2 ** -20, 1 + 2 ** -7],
]

/**
 * Rounds float32, and multiplies small integers that are bfloat16, as weights are: handed over as bytes, reinterpreted, transposed, and cast
 * where the engine does not multiply so. That this works is nothing that TensorFlow.js promises.
 *
 * @returns what is wrong; `undefined` when all is right
 */
export function bfloat16Problem(engine: Engine): string | undefined {
  const [rows, inner, columns] = [3, 33, 5]
  const element = (i: number) => VALUES[(i * 7) % VALUES.length] as number
  const left = Array.from({ length: rows * inner }, (_, i) => element(i))
  const right = Array.from({ length: columns * inner }, (_, i) => element(i + 2))
  const expected = Array.from({ length: rows * columns }, (_, n) => {
    const [row, column] = [Math.floor(n / columns), n % columns]
    const products = Array.from({ length: inner }, (_, k) => element(row * inner + k) * element(column * inner + k + 2))
    return products.reduce((sum, product) => sum + product, 0)
  })
  try {
    const wronglyRounded = round(engine).findIndex((value, i) => value !== ROUNDED[i]?.[1])
    if (wronglyRounded >= 0) return `${ROUNDED[wronglyRounded]?.[0]} is not rounded to nearest, ties to even`
    const product = multiply(engine, { left, right, rows, inner, columns })
    const wrong = product.findIndex((value, i) => value !== expected[i])
    if (product.length === expected.length && wrong < 0) return undefined
    return `a product is ${product[wrong]} at ${wrong}, not ${expected[wrong]}`
  } catch (cause) {
    return cause instanceof Error ? cause.message : String(cause)
  }
}

function round(engine: Engine): Float32Array {
  const [rounded] = engine.tidy(() => {
    const x = engine.write(
      'float32',
      [ROUNDED.length],
      Float32Array.from(ROUNDED, ([value]) => value),
    )
    return [engine.roundToBfloat16(x)]
  })
  return readAndFree(engine, rounded as Ref)
}

function readAndFree(engine: Engine, ref: Ref): Float32Array {
  try {
    return engine.read(ref) as Float32Array
  } finally {
    engine.free(ref)
  }
}

interface Product {
  readonly left: readonly number[]
  readonly right: readonly number[]
  readonly rows: number
  readonly inner: number
  readonly columns: number
}

function multiply(engine: Engine, { left, right, rows, inner, columns }: Product): Float32Array {
  const [product] = engine.tidy(() => {
    const x = engine.write('float32', [1, rows, inner], Float32Array.from(left))
    const bits = Uint16Array.from(right, (value) => BITS.get(value) as number)
    const weight = engine.write('bfloat16', [1, columns, inner], bits)
    if (!engine.multipliesBfloat16) return [engine.matMul(x, engine.cast(weight, 'float32'), true)]
    return [engine.cast(engine.matMul(engine.cast(x, 'bfloat16'), weight, true), 'float32')]
  })
  return readAndFree(engine, product as Ref)
}

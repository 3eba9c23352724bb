import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import {
  bfloat16ToFloat32,
  castData,
  DTYPES,
  type DType,
  float16ToFloat32,
  float32ToBfloat16,
  float32ToFloat16,
  isFloatingPoint,
  itemSize,
  viewAs,
} from '../src/dtype.ts'

interface Format {
  readonly name: 'bfloat16' | 'float16'
  readonly exponentBits: number
  readonly fractionBits: number
  readonly decode: (bits: number) => number
  readonly encode: (value: number) => number
}

const BFLOAT16: Format = {
  name: 'bfloat16',
  exponentBits: 8,
  fractionBits: 7,
  decode: bfloat16ToFloat32,
  encode: float32ToBfloat16,
}
const FLOAT16: Format = {
  name: 'float16',
  exponentBits: 5,
  fractionBits: 10,
  decode: float16ToFloat32,
  encode: float32ToFloat16,
}
const PATTERNS = Array.from({ length: 0x10000 }, (_, bits) => bits)

/** What a bit pattern stands for by IEEE 754, from its three fields. */
function valueByFields(bits: number, { exponentBits, fractionBits }: Format): number {
  const bias = 2 ** (exponentBits - 1) - 1
  const sign = bits >= 0x8000 ? -1 : 1
  const exponent = Math.floor((bits % 0x8000) / 2 ** fractionBits)
  const fraction = bits % 2 ** fractionBits
  if (exponent === 2 ** exponentBits - 1) return fraction === 0 ? sign * Number.POSITIVE_INFINITY : Number.NaN
  if (exponent === 0) return sign * fraction * 2 ** (1 - bias - fractionBits)
  return sign * (1 + fraction / 2 ** fractionBits) * 2 ** (exponent - bias)
}

/**
 * Rounds by looking for the nearest neighbours among all finite values of the format: independent of any bit trick.
 * The first value that overflows counts as the neighbour above the largest finite one, as IEEE 754 rounds.
 */
function roundBySearch(value: number, format: Format): number {
  if (Number.isNaN(value)) return Number.NaN
  const sign = value < 0 || Object.is(value, -0) ? -1 : 1
  const magnitude = Math.abs(value)
  const infinity = (2 ** format.exponentBits - 1) * 2 ** format.fractionBits
  const at = (bits: number) => (bits === infinity ? 2 ** (2 ** (format.exponentBits - 1)) : valueByFields(bits, format))
  let [low, high] = [0, infinity]
  while (high - low > 1) {
    const middle = (low + high) >> 1
    if (at(middle) <= magnitude) low = middle
    else high = middle
  }
  const [below, above] = [magnitude - at(low), at(high) - magnitude]
  const nearest = below < above || (below === above && low % 2 === 0) ? low : high
  return sign * (nearest === infinity ? Number.POSITIVE_INFINITY : valueByFields(nearest, format))
}

const float32 = fc.oneof(
  fc.float({ noNaN: false }),
  // All magnitudes alike, subnormals included: any pattern of bits.
  fc.integer({ min: 0, max: 0xffffffff }).map((bits) => new Float32Array(Uint32Array.of(bits).buffer)[0] as number),
)

describe.each([BFLOAT16, FLOAT16])('$name', (format) => {
  it('decodes every bit pattern', () => {
    const wrong = PATTERNS.filter((bits) => !Object.is(format.decode(bits), valueByFields(bits, format)))
    expect(wrong).toEqual([])
  })

  it('encodes every value it has to its own bits', () => {
    const numbers = PATTERNS.filter((bits) => !Number.isNaN(valueByFields(bits, format)))
    const wrong = numbers.filter((bits) => format.encode(format.decode(bits)) !== bits)
    expect(wrong).toEqual([])
  })

  it('keeps every NaN a NaN', () => {
    const nans = PATTERNS.filter((bits) => Number.isNaN(valueByFields(bits, format)))
    expect(nans.length).toBe(2 ** (format.fractionBits + 1) - 2)
    const lost = nans.filter((bits) => !Number.isNaN(format.decode(format.encode(format.decode(bits)))))
    expect(lost).toEqual([])
  })

  it('rounds halfway between two neighbours to the even one, and just beside it to the nearer one', () => {
    const infinity = (2 ** format.exponentBits - 1) * 2 ** format.fractionBits
    for (let bits = 0; bits < infinity - 1; bits++) {
      const [low, high] = [valueByFields(bits, format), valueByFields(bits + 1, format)]
      const middle = low + (high - low) / 2
      const halfway = Math.fround(middle)
      if (halfway !== middle) throw new Error(`${middle} is not a float32`)
      const [before, after] = neighbours(halfway)
      const rounded = [before, halfway, after].map(format.encode)
      const expected = [bits, bits % 2 === 0 ? bits : bits + 1, bits + 1]
      if (rounded.join() !== expected.join()) throw new Error(`around ${halfway}: ${rounded} instead of ${expected}`)
      const negative = [-before, -halfway, -after].map(format.encode)
      expect(negative).toEqual(expected.map((positive) => positive + 0x8000))
    }
  })

  it('rounds any float32 to the nearest value', () => {
    fc.assert(
      fc.property(float32, (value) => {
        expect(format.decode(format.encode(value))).toBe(roundBySearch(value, format))
      }),
      { numRuns: 5000 },
    )
  })

  it('overflows to infinity from halfway above the largest finite value', () => {
    const largest = valueByFields((2 ** format.exponentBits - 1) * 2 ** format.fractionBits - 1, format)
    const ulp = largest - valueByFields((2 ** format.exponentBits - 1) * 2 ** format.fractionBits - 2, format)
    const overflow = Math.fround(largest + ulp / 2)
    expect(format.decode(format.encode(overflow))).toBe(Number.POSITIVE_INFINITY)
    expect(format.decode(format.encode(-overflow))).toBe(Number.NEGATIVE_INFINITY)
    expect(format.decode(format.encode(neighbours(overflow)[0]))).toBe(largest)
  })
})

/** The float32 values just below and just above a positive one. */
function neighbours(value: number): [number, number] {
  const bits = new Uint32Array(Float32Array.of(value).buffer)[0] as number
  const at = (pattern: number) => new Float32Array(Uint32Array.of(pattern).buffer)[0] as number
  return [bits === 0 ? 0 : at(bits - 1), at(bits + 1)]
}

describe('castData', () => {
  const FLOATS: readonly DType[] = ['float64', 'float32', 'float16', 'bfloat16']
  const INTEGERS: readonly DType[] = ['int64', 'int32', 'int16', 'int8', 'uint8']

  it('returns the same array for the same dtype', () => {
    const data = Float32Array.of(1, 2)
    expect(castData(data, 'float32', 'float32')).toBe(data)
  })

  it('carries small integers through every pair of dtypes unchanged', () => {
    const values = [0, 1, 2, 5, 100, 127]
    for (const from of [...FLOATS, ...INTEGERS]) {
      for (const to of [...FLOATS, ...INTEGERS]) {
        const stored = castData(Float64Array.from(values), 'float64', from)
        const back = castData(castData(stored, from, to), to, 'float64')
        expect([from, to, ...back]).toEqual([from, to, ...values])
      }
    }
  })

  it('widens bfloat16 to float32 by the same rule for a block as for one element', () => {
    const bits = Uint16Array.from(PATTERNS)
    const cast = castData(bits, 'bfloat16', 'float32')
    expect(PATTERNS.filter((pattern) => !Object.is(cast[pattern], bfloat16ToFloat32(pattern)))).toEqual([])
  })

  it('rounds float32 to bfloat16 by the same rule for a block as for one element', () => {
    fc.assert(
      fc.property(fc.array(float32), (values) => {
        const rounded = castData(Float32Array.from(values), 'float32', 'bfloat16')
        expect([...rounded]).toEqual(values.map(float32ToBfloat16))
      }),
    )
  })

  it('rounds float64 to float32 before it rounds to 16 bits', () => {
    const justAboveHalfway = Float64Array.of(1 + 2 ** -8 + 2 ** -40)
    expect([...castData(justAboveHalfway, 'float64', 'bfloat16')]).toEqual([float32ToBfloat16(1)])
  })

  it('keeps the sign of integers and truncates fractions towards zero', () => {
    expect([...castData(Float32Array.of(-3.7, 3.7), 'float32', 'int32')]).toEqual([-3, 3])
    expect([...castData(Float32Array.of(-3.7, 3.7), 'float32', 'int64')]).toEqual([-3n, 3n])
  })

  it('makes a bool 0 or 1', () => {
    expect([...castData(Float32Array.of(0, -0, 0.1, 256), 'float32', 'bool')]).toEqual([0, 0, 1, 1])
  })
})

describe('viewAs', () => {
  it('shares aligned bytes and copies others', () => {
    const buffer = new Uint8Array(16)
    buffer.set(new Uint8Array(Float32Array.of(1.5).buffer), 5)
    expect(viewAs('float32', buffer.subarray(4, 8)).buffer).toBe(buffer.buffer)
    const copied = viewAs('float32', buffer.subarray(5, 9))
    expect(copied.buffer).not.toBe(buffer.buffer)
    expect([...copied]).toEqual([1.5])
  })
})

it('knows item sizes and which dtypes are floats', () => {
  expect(DTYPES.map(itemSize)).toEqual([8, 4, 2, 2, 8, 4, 2, 1, 1, 1])
  expect(DTYPES.filter(isFloatingPoint)).toEqual(['float64', 'float32', 'float16', 'bfloat16'])
})

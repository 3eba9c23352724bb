import { type DType, itemSize, type ReduceOp, viewAs } from '@rankwise/core'
import fc from 'fast-check'
import { describe, expect, test } from 'vitest'
import { reduce } from '../src/reduce.ts'
import { firstDifference, randomBytes, reduceSequentially } from './oracle.ts'

const DTYPES = ['float32', 'float64', 'float16', 'bfloat16', 'int32'] as const
const OPS = ['sum', 'max', 'min'] as const

function contributions(dtype: DType, ranks: number, elements: number, seed: number): Uint8Array[] {
  return Array.from({ length: ranks }, (_, rank) => randomBytes(dtype, elements, seed * 100 + rank))
}

function reduceAll(dtype: DType, op: ReduceOp, parts: readonly Uint8Array[]): Uint8Array {
  const { length } = parts[0] as Uint8Array
  const source = new Uint8Array(Buffer.concat(parts))
  const target = new Uint8Array(length)
  const elements = length / itemSize(dtype)
  reduce(dtype, op, {
    source: viewAs(dtype, source),
    first: 0,
    stride: elements,
    ranks: parts.length,
    target: viewAs(dtype, target),
    targetStart: 0,
    count: elements,
  })
  return target
}

describe.each(DTYPES)('reduce %s', (dtype) => {
  test.each(OPS)('%s equals the sequential computation in rank order, bit for bit', (op) => {
    fc.assert(
      fc.property(
        fc.integer({ min: 2, max: 8 }),
        fc.integer({ min: 0, max: 9000 }),
        fc.nat(1e6),
        (ranks, size, seed) => {
          const parts = contributions(dtype, ranks, size, seed)
          expect(
            firstDifference(dtype, reduceAll(dtype, op, parts), reduceSequentially(dtype, op, parts)),
          ).toBeUndefined()
        },
      ),
      { numRuns: 30 },
    )
  })
})

test('the result may lie over the contribution of rank 0', () => {
  const parts = contributions('float32', 3, 10_000, 1)
  const source = viewAs('float32', new Uint8Array(Buffer.concat(parts)))
  const places = { first: 0, stride: 10_000, ranks: 3, targetStart: 0, count: 10_000 }
  reduce('float32', 'sum', { ...places, source, target: source })
  const result = new Uint8Array(source.buffer, 0, 40_000)
  expect(firstDifference('float32', result, reduceSequentially('float32', 'sum', parts))).toBeUndefined()
})

describe('the comparison can fail', () => {
  const parts = contributions('float32', 3, 1000, 7)
  const expected = reduceSequentially('float32', 'sum', parts)

  test('another order of the ranks is found', () => {
    const [a, b, c] = parts as [Uint8Array, Uint8Array, Uint8Array]
    expect(firstDifference('float32', reduceAll('float32', 'sum', [c, b, a]), expected)).toBeDefined()
  })

  test('a skipped rank is found', () => {
    expect(firstDifference('float32', reduceAll('float32', 'sum', parts.slice(0, 2)), expected)).toBeDefined()
  })

  test('rounding after every rank instead of once is found', () => {
    const halves = contributions('bfloat16', 3, 1000, 7)
    const [a, b, c] = halves as [Uint8Array, Uint8Array, Uint8Array]
    const twice = reduceSequentially('bfloat16', 'sum', [reduceSequentially('bfloat16', 'sum', [a, b]), c])
    expect(firstDifference('bfloat16', reduceAll('bfloat16', 'sum', halves), twice)).toBeDefined()
  })
})

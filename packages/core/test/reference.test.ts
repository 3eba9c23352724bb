import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import type { Attributes } from '../src/graph.ts'
import { opNames } from '../src/op.ts'
import '../src/ops/index.ts'
import { type Float64Tensor, hasReferenceOp, referenceOp } from '../src/reference/index.ts'
import { Tensor } from '../src/tensor.ts'
import { codeOf, distance, float64, randomTensor } from './support.ts'

// Expected values are written out, or come from formulas on indices that share no code with the kernels.

function one(op: string, inputs: readonly Tensor[], attributes: Attributes = {}): Float64Tensor {
  const results = referenceOp(op, inputs, attributes)
  expect(results).toHaveLength(1)
  return results[0] as Float64Tensor
}

/** A tensor from a formula of its index. */
function fromIndex(shape: readonly number[], f: (...index: number[]) => number): Float64Tensor {
  const size = shape.reduce((product, length) => product * length, 1)
  const data = Array.from({ length: size }, (_, flat) => {
    let rest = flat
    const index: number[] = []
    for (const length of [...shape].reverse()) {
      index.unshift(rest % length)
      rest = Math.floor(rest / length)
    }
    return f(...index)
  })
  return float64(shape, data)
}

/** The element at an index. */
function at(tensor: Tensor, ...index: number[]): number {
  const flat = index.reduce((sum, i, dim) => sum * (tensor.shape[dim] as number) + i, 0)
  return Number(tensor.data[flat])
}

const range = (length: number) => Array.from({ length }, (_, i) => i)
const total = (values: readonly number[]) => values.reduce((sum, value) => sum + value, 0)

it('has a kernel for every operation that one rank can compute', () => {
  expect(opNames().filter((op) => !hasReferenceOp(op))).toEqual(['all_reduce'])
  expect(codeOf(() => referenceOp('all_reduce', [], {}))).toBe('OP_UNKNOWN')
  expect(codeOf(() => referenceOp('toString', [], {}))).toBe('OP_UNKNOWN')
})

it('computes in float64 whatever the dtype of the operands', () => {
  const x = Tensor.float32([2], [1, 2 ** 24])
  const y = new Tensor('bfloat16', [2], Uint16Array.of(0x3f80, 0x3f80))
  expect(one('add', [x, y])).toEqual(float64([2], [2, 2 ** 24 + 1]))
})

describe('elementwise', () => {
  it('broadcasts from the right', () => {
    const a = float64([2, 1], [10, 20])
    const b = float64([3], [1, 2, 3])
    expect(one('add', [a, b])).toEqual(float64([2, 3], [11, 12, 13, 21, 22, 23]))
    expect(one('sub', [b, a])).toEqual(float64([2, 3], [-9, -8, -7, -19, -18, -17]))
    expect(one('mul', [a, b])).toEqual(float64([2, 3], [10, 20, 30, 20, 40, 60]))
    expect(one('div', [a, float64([3], [1, 2, 4])])).toEqual(float64([2, 3], [10, 5, 2.5, 20, 10, 5]))
  })

  it('broadcasts in the middle, on both sides, and from a scalar', () => {
    const [a, b] = [randomTensor([3, 1, 2], 1), randomTensor([1, 4, 1], 2)]
    const expected = fromIndex([3, 4, 2], (i, j, k) => at(a, i, 0, k) * at(b, 0, j, 0))
    expect(one('mul', [a, b])).toEqual(expected)
    expect(one('add', [float64([], [1]), float64([2], [2, 3])])).toEqual(float64([2], [3, 4]))
  })

  it('adds and multiplies by numbers', () => {
    expect(one('add_scalar', [float64([2], [1, 2])], { value: -1.5 })).toEqual(float64([2], [-0.5, 0.5]))
    expect(one('mul_scalar', [float64([2], [1, 2])], { value: -1.5 })).toEqual(float64([2], [-1.5, -3]))
  })

  it('knows silu, sin and cos', () => {
    const x = float64([4], [0, 1, -1, 30])
    const expected = [0, 0.7310585786300049, -0.2689414213699951, 29.999999999997193]
    expect(distance(one('silu', [x]), float64([4], expected))).toBeLessThan(1e-15)
    expect(one('silu', [float64([1], [-1000])]).data[0]).toBeCloseTo(0)
    expect(distance(one('sin', [float64([2], [0, Math.PI / 6])]), float64([2], [0, 0.5]))).toBeLessThan(1e-15)
    expect(distance(one('cos', [float64([2], [0, Math.PI / 3])]), float64([2], [1, 0.5]))).toBeLessThan(1e-15)
  })
})

describe('linear and embedding', () => {
  it('multiplies by the transposed weight', () => {
    const x = float64([1, 2, 3], [1, 2, 3, 4, 5, 6])
    const weight = float64([2, 3], [1, 0, -1, 2, 2, 2])
    expect(one('linear', [x, weight])).toEqual(float64([1, 2, 2], [-2, 12, -2, 30]))
  })

  it('looks rows up, and refuses ids outside of the table', () => {
    const table = float64([3, 2], [1, 2, 3, 4, 5, 6])
    expect(one('embedding', [Tensor.int32([1, 2], [2, 0]), table])).toEqual(float64([1, 2, 2], [5, 6, 1, 2]))
    expect(codeOf(() => one('embedding', [Tensor.int32([1], [3]), table]))).toBe('EMBEDDING_ID')
    expect(codeOf(() => one('embedding', [Tensor.int32([1], [-1]), table]))).toBe('EMBEDDING_ID')
  })
})

describe('movement', () => {
  const x = fromIndex([2, 3, 4], (i, j, k) => 100 * i + 10 * j + k)

  it('transposes', () => {
    const expected = fromIndex([4, 2, 3], (k, i, j) => 100 * i + 10 * j + k)
    expect(one('transpose', [x], { permutation: [2, 0, 1] })).toEqual(expected)
  })

  it('splits and concatenates along any dimension', () => {
    for (const dim of [0, 1, 2]) {
      const size = x.shape[dim] as number
      const pieces = referenceOp('split', [x], { dim, sizes: [1, 0, size - 1] })
      expect(pieces.map((piece) => piece.shape[dim])).toEqual([1, 0, size - 1])
      expect(one('concat', pieces, { dim })).toEqual(x)
    }
    const [, right] = referenceOp('split', [x], { dim: 2, sizes: [3, 1] })
    expect(right).toEqual(float64([2, 3, 1], [3, 13, 23, 103, 113, 123]))
  })

  it('reshapes without moving an element', () => {
    expect(one('reshape', [x], { shape: [6, 4] })).toEqual(float64([6, 4], [...x.data]))
  })

  it('takes the ranges of a shard', () => {
    const sharded = one('shard', [x], { dim: 1, starts: [2, 0], ends: [3, 1] })
    expect(sharded).toEqual(fromIndex([2, 2, 4], (i, j, k) => 100 * i + 10 * (j === 0 ? 2 : 0) + k))
    expect(one('shard', [x], { dim: 1, blocks: [3] })).toEqual(x)
  })

  it('never shares memory with its operand', () => {
    const calls: readonly [string, Attributes][] = [
      ['reshape', { shape: [24] }],
      ['transpose', { permutation: [0, 1, 2] }],
      ['split', { dim: 0, sizes: [2] }],
      ['concat', { dim: 0 }],
      ['shard', { dim: 1, blocks: [3] }],
    ]
    for (const [op, attributes] of calls) expect(one(op, [x], attributes).data.buffer).not.toBe(x.data.buffer)
  })
})

describe('norms', () => {
  const x = randomTensor([2, 3, 4], 3, 5)

  it('layer_norm: mean 0, biased variance 1, then weight and bias', () => {
    const [weight, bias] = [randomTensor([4], 4), randomTensor([4], 5)]
    const eps = 1e-2
    const row = (i: number, j: number) => range(4).map((k) => at(x, i, j, k))
    const plain = fromIndex([2, 3, 4], (i, j, k) => {
      const mean = total(row(i, j)) / 4
      const variance = total(row(i, j).map((value) => value ** 2)) / 4 - mean ** 2
      return (at(x, i, j, k) - mean) / (variance + eps) ** 0.5
    })
    const full = fromIndex([2, 3, 4], (i, j, k) => at(plain, i, j, k) * at(weight, k) + at(bias, k))
    expect(distance(one('layer_norm', [x], { eps }), plain)).toBeLessThan(1e-14)
    expect(distance(one('layer_norm', [x, weight, bias], { eps }), full)).toBeLessThan(1e-14)
  })

  it('rms_norm: mean square 1, then weight', () => {
    const weight = randomTensor([4], 6)
    const eps = 1e-2
    const expected = fromIndex([2, 3, 4], (i, j, k) => {
      const square = total(range(4).map((n) => at(x, i, j, n) ** 2)) / 4
      return (at(x, i, j, k) / (square + eps) ** 0.5) * at(weight, k)
    })
    expect(distance(one('rms_norm', [x, weight], { eps }), expected)).toBeLessThan(1e-14)
    expect(one('rms_norm', [float64([1, 2], [3, 4])], { eps: 0 }).data[0]).toBeCloseTo(3 / 12.5 ** 0.5, 14)
  })

  it('group_norm: channels of a group and their pixels together, weights per channel', () => {
    const image = randomTensor([2, 4, 2, 3], 7, 5)
    const [weight, bias] = [randomTensor([4], 8), randomTensor([4], 9)]
    const eps = 1e-3
    const group = (b: number, c: number) =>
      range(2).flatMap((n) => range(6).map((p) => at(image, b, 2 * Math.floor(c / 2) + n, Math.floor(p / 3), p % 3)))
    const expected = fromIndex([2, 4, 2, 3], (b, c, i, j) => {
      const mean = total(group(b, c)) / 12
      const variance = total(group(b, c).map((value) => (value - mean) ** 2)) / 12
      return ((at(image, b, c, i, j) - mean) / (variance + eps) ** 0.5) * at(weight, c) + at(bias, c)
    })
    expect(distance(one('group_norm', [image, weight, bias], { groups: 2, eps }), expected)).toBeLessThan(1e-14)
  })
})

describe('attention', () => {
  /** softmax(q k^T scale + mask) v by the definition, without the shift by the maximum. */
  function naive(q: Tensor, k: Tensor, v: Tensor, scale: number, mask: (b: number, i: number, j: number) => number) {
    const [batch, queries, heads, width] = q.shape as [number, number, number, number]
    const [, keys, kvHeads, valueWidth] = v.shape as [number, number, number, number]
    return fromIndex([batch, queries, heads, valueWidth], (b, i, h, d) => {
      const g = Math.floor(h / (heads / kvHeads))
      const weights = range(keys).map((j) => {
        const product = total(range(width).map((n) => at(q, b, i, h, n) * at(k, b, j, g, n)))
        return Math.exp(product * scale + mask(b, i, j))
      })
      const sum = total(weights)
      return sum === 0 ? 0 : total(range(keys).map((j) => ((weights[j] as number) / sum) * at(v, b, j, g, d)))
    })
  }

  const scale = 0.4
  const [q, k, v] = [randomTensor([2, 3, 4, 2], 10), randomTensor([2, 5, 4, 2], 11), randomTensor([2, 5, 4, 6], 12)]

  it('is the definition', () => {
    expect(
      distance(
        one('attention', [q, k, v], { scale, causal: false }),
        naive(q, k, v, scale, () => 0),
      ),
    ).toBeLessThan(1e-14)
  })

  it('groups consecutive query heads over one key head', () => {
    const [grouped, values] = [randomTensor([2, 5, 2, 2], 13), randomTensor([2, 5, 2, 6], 14)]
    const expected = naive(q, grouped, values, scale, () => 0)
    expect(distance(one('attention', [q, grouped, values], { scale, causal: false }), expected)).toBeLessThan(1e-14)
  })

  it('adds a bias, of one batch or of every batch', () => {
    for (const batch of [1, 2]) {
      const bias = randomTensor([batch, 1, 3, 5], 15)
      const expected = naive(q, k, v, scale, (b, i, j) => at(bias, b % batch, 0, i, j))
      expect(distance(one('attention', [q, k, v, bias], { scale, causal: false }), expected)).toBeLessThan(1e-14)
    }
  })

  it('lets query i see the keys 0 to i when it is causal', () => {
    const expected = naive(q, k, v, scale, (_, i, j) => (j > i ? Number.NEGATIVE_INFINITY : 0))
    const causal = one('attention', [q, k, v], { scale, causal: true })
    expect(distance(causal, expected)).toBeLessThan(1e-14)
    expect(range(6).map((d) => at(causal, 1, 0, 2, d))).toEqual(range(6).map((d) => at(v, 1, 0, 2, d)))
  })

  it('combines a bias with causality', () => {
    const bias = randomTensor([1, 1, 3, 5], 16)
    const expected = naive(q, k, v, scale, (_, i, j) => (j > i ? Number.NEGATIVE_INFINITY : at(bias, 0, 0, i, j)))
    expect(distance(one('attention', [q, k, v, bias], { scale, causal: true }), expected)).toBeLessThan(1e-14)
  })

  it('ignores a key that is masked, and gives zeros where every key is', () => {
    const masked = (i: number, j: number) => i === 1 || j === 2
    const bias = fromIndex([1, 1, 3, 5], (_b, _h, i, j) => (masked(i, j) ? Number.NEGATIVE_INFINITY : 0))
    const result = one('attention', [q, k, v, bias], { scale, causal: false })
    const expected = naive(q, k, v, scale, (_, i, j) => (masked(i, j) ? Number.NEGATIVE_INFINITY : 0))
    expect(distance(result, expected)).toBeLessThan(1e-14)
    expect(range(24).map((n) => at(result, 0, 1, Math.floor(n / 6), n % 6))).toEqual(range(24).map(() => 0))
  })

  it('survives scores that overflow exp', () => {
    const far = float64([1, 1, 1, 1], [1000])
    const result = one('attention', [far, float64([1, 2, 1, 1], [1000, 999]), float64([1, 2, 1, 1], [3, 5])], {
      scale: 1,
      causal: false,
    })
    expect([...result.data]).toEqual([3])
  })
})

describe('rope', () => {
  const x = randomTensor([2, 3, 2, 4], 17)
  const angles = randomTensor([3, 2], 18, 3)
  const [cos, sin] = [one('cos', [angles]), one('sin', [angles])]

  it.each([
    {
      interleaved: true,
      pairs: [
        [0, 1],
        [2, 3],
      ],
    },
    {
      interleaved: false,
      pairs: [
        [0, 2],
        [1, 3],
      ],
    },
  ])('rotates the pairs $pairs (interleaved $interleaved)', ({ interleaved, pairs }) => {
    const expected = fromIndex([2, 3, 2, 4], (b, t, h, d) => {
      const i = pairs.findIndex((pair) => pair.includes(d))
      const [first, second] = pairs[i] as [number, number]
      // The pair as a complex number, times e^(i angle).
      const [re, im] = [at(x, b, t, h, first), at(x, b, t, h, second)]
      const [c, s] = [Math.cos(at(angles, t, i)), Math.sin(at(angles, t, i))]
      return d === first ? re * c - im * s : re * s + im * c
    })
    expect(distance(one('rope', [x, cos, sin], { interleaved }), expected)).toBeLessThan(1e-15)
  })
})

describe('images', () => {
  it('conv2d correlates, with zeros around the image', () => {
    fc.assert(
      fc.property(
        fc.record({
          stride: fc.integer({ min: 1, max: 3 }),
          kernel: fc.tuple(fc.integer({ min: 1, max: 3 }), fc.integer({ min: 1, max: 3 })),
          padding: fc.tuple(...[0, 1, 2, 3].map(() => fc.integer({ min: 0, max: 2 }))),
          size: fc.tuple(fc.integer({ min: 3, max: 6 }), fc.integer({ min: 3, max: 6 })),
        }),
        ({ stride, kernel: [kh, kw], padding, size: [height, width] }) => {
          const [top = 0, bottom = 0, left = 0, right = 0] = padding
          const x = randomTensor([2, 2, height, width], 19)
          const [weight, bias] = [randomTensor([3, 2, kh, kw], 20), randomTensor([3], 21)]
          const pixel = (b: number, c: number, y: number, z: number) =>
            y < 0 || z < 0 || y >= height || z >= width ? 0 : at(x, b, c, y, z)
          const positions = (length: number, window: number) =>
            range(length).filter((i) => i % stride === 0 && i + window <= length).length
          const shape = [2, 3, positions(height + top + bottom, kh), positions(width + left + right, kw)]
          const expected = fromIndex(shape, (b, o, y, z) => {
            const products = range(2 * kh * kw).map((n) => {
              const [c, i, j] = [Math.floor(n / (kh * kw)), Math.floor(n / kw) % kh, n % kw]
              return at(weight, o, c, i, j) * pixel(b, c, y * stride + i - top, z * stride + j - left)
            })
            return at(bias, o) + total(products)
          })
          expect(distance(one('conv2d', [x, weight, bias], { stride, padding }), expected)).toBeLessThan(1e-14)
        },
      ),
    )
  })

  it('upsample_nearest2d repeats pixels', () => {
    const x = randomTensor([2, 2, 2, 3], 22)
    const expected = fromIndex([2, 2, 6, 9], (b, c, i, j) => at(x, b, c, Math.floor(i / 3), Math.floor(j / 3)))
    expect(one('upsample_nearest2d', [x], { scale: 3 })).toEqual(expected)
  })
})

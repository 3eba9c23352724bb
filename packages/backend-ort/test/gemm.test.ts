import { readFileSync } from 'node:fs'
import { bfloat16ToFloat32, float32ToBfloat16 } from '@rankwise/core'
import fc from 'fast-check'
import { afterAll, describe, expect, it } from 'vitest'
import { GemmLibrary, NO_COMPILER, type Sizes, type Tile } from './gemm/library.ts'
import { dense, exact, matrices, product, randomMatrices, wrongElement } from './gemm/matrices.ts'

const library = NO_COMPILER === undefined ? new GemmLibrary() : undefined
afterAll(() => library?.[Symbol.dispose]())

const strided: fc.Arbitrary<Sizes> = fc
  .record({
    m: fc.oneof(fc.nat(20), fc.nat(70)),
    n: fc.oneof(fc.nat(70), fc.nat(300)),
    k: fc.oneof(fc.nat(40), fc.nat(600)),
    gap: fc.tuple(fc.nat(5), fc.nat(5), fc.nat(5)),
  })
  .map(({ m, n, k, gap: [x, w, y] }) => ({ m, n, k, xStride: k + x, wStride: k + w, yStride: n + y }))

describe.skipIf(NO_COMPILER !== undefined)('the matrix multiply of backend-ort', () => {
  const loaded = library as GemmLibrary

  it('has a kernel for every instruction set of this processor that one is compiled for', () => {
    const flags = new Set(
      readFileSync('/proc/cpuinfo', 'utf8')
        .match(/^flags\s*:.*$/m)?.[0]
        .split(/\s+/),
    )
    const has = (...names: string[]) => names.every((name) => flags.has(name))
    const expected = [
      ...(has('avx512f', 'avx512bw', 'fma') ? ['avx512'] : []),
      ...(has('avx2', 'fma') ? ['avx2'] : []),
      'baseline',
    ]
    expect(loaded.variants).toEqual(expected)
  })

  it('divides y among any number of workers, into tiles that cover it once', () => {
    const sizes = fc.tuple(
      fc.nat(200),
      fc.oneof(fc.nat(300), fc.nat(3000)),
      fc.nat(5000),
      fc.integer({ min: 1, max: 70 }),
    )
    fc.assert(
      fc.property(sizes, ([m, n, k, workers]) => {
        const tiles = loaded.tiles(m, n, k, workers)
        expect(tiles.length).toBeLessThanOrEqual(workers)
        expect(tiles.length > 0).toBe(m > 0 && n > 0)
        const covered = new Uint8Array(m * n)
        for (const [row, rowEnd, column, columnEnd] of tiles) {
          expect(row < rowEnd && column < columnEnd).toBe(true)
          for (let i = row; i < rowEnd; i++)
            for (let j = column; j < columnEnd; j++) covered[i * n + j] = (covered[i * n + j] as number) + 1
        }
        expect(covered.every((times) => times === 1)).toBe(true)
      }),
      { numRuns: 50 },
    )
  })

  it('gives every worker something where y is large', () => {
    for (const workers of [1, 2, 3, 4, 8, 16]) expect(loaded.tiles(768, 9216, 3072, workers)).toHaveLength(workers)
  })

  describe.each(loaded?.variants ?? [])('%s', (variant) => {
    it('is within rounding of float64 for every shape, stride, address and division', () => {
      const placements = fc.record({ odd: fc.boolean(), atEnd: fc.boolean(), tiles: fc.integer({ min: 1, max: 5 }) })
      fc.assert(
        fc.property(strided, placements, fc.nat(1e6), (sizes, placement, seed) => {
          const given = randomMatrices(sizes, seed)
          expect(wrongElement(product(loaded, variant, given, placement), given)).toBeUndefined()
        }),
        { numRuns: 60 },
      )
    })

    it('is right where blocks of every kind follow each other', () => {
      for (const sizes of [dense(300, 2070, 3), dense(15, 530, 770), dense(1030, 33, 257)]) {
        const given = randomMatrices(sizes, 1)
        expect(wrongElement(product(loaded, variant, given), given)).toBeUndefined()
      }
    })

    it.each([768, 3072, 12288])('has a relative RMS of at most 1e-6 over %i products', (k) => {
      const given = randomMatrices(dense(17, 40, k), k)
      const y = product(loaded, variant, given)
      let squares = 0
      let error = 0
      for (const [index, actual] of y.entries()) {
        const { sum } = exact(given, Math.floor(index / 40), index % 40)
        squares += sum ** 2
        error += (actual - sum) ** 2
      }
      expect(Math.sqrt(error / squares)).toBeLessThan(1e-6)
      expect(error).toBeGreaterThan(0)
    })

    it('is exact for whole numbers', () => {
      const given = matrices(
        dense(29, 67, 4000),
        (i, p) => ((i * 7 + p * 3) % 33) - 16,
        (j, p) => ((j * 5 + p * 11) % 61) - 30,
      )
      const expected = Array.from({ length: 29 * 67 }, (_, i) => exact(given, Math.floor(i / 67), i % 67).sum)
      expect([...product(loaded, variant, given)]).toEqual(expected)
    })

    it('passes on NaN and infinities, and only to what depends on them', () => {
      const { NaN: nan, POSITIVE_INFINITY: infinity } = Number
      const x = [nan, infinity, 0, 1]
      const w = [nan, infinity, -infinity, 0, 1]
      const given = matrices(
        dense(x.length * 5, w.length * 9, 300),
        (i, p) => (p === 299 ? (x[i % x.length] as number) : 1),
        (j, p) => (p === 299 ? (w[j % w.length] as number) : 1),
      )
      const expected = Array.from({ length: 20 * 45 }, (_, i) => exact(given, Math.floor(i / 45), i % 45).sum)
      expect([...product(loaded, variant, given)]).toEqual(expected)
    })

    it('keeps subnormal numbers', () => {
      const given = matrices(
        dense(3, 3, 1),
        (i) => [2 ** 100, 2 ** -149, 2 ** -70][i] as number,
        (j) => [2 ** -133, 2 ** 100, 2 ** -70][j] as number,
      )
      const expected = [2 ** -33, Infinity, 2 ** 30, 0, 2 ** -49, 0, 0, 2 ** 30, 2 ** -140]
      expect([...product(loaded, variant, given)]).toEqual(expected)
    })

    it('rounds y to bfloat16 once all of k is summed', () => {
      for (const sizes of [dense(29, 67, 600), dense(17, 32, 256), dense(3, 40, 1), dense(5, 33, 0)]) {
        const given = randomMatrices(sizes, 4)
        const expected = product(loaded, variant, given).map((value) => bfloat16ToFloat32(float32ToBfloat16(value)))
        expect(product(loaded, variant, given, { rounds: true, tiles: 2 })).toEqual(expected)
      }
      const { NaN: nan, POSITIVE_INFINITY: infinity } = Number
      const [below, above] = [1 + 2 ** -8, 1 + 3 * 2 ** -8]
      const x = [nan, -nan, infinity, -infinity, 2 ** 128 - 2 ** 104, below, above, -below, 2 ** -149, -0, 1 + 2 ** -7]
      const given = matrices(
        dense(x.length, 1, 1),
        (i) => x[i] as number,
        () => 1,
      )
      const y = product(loaded, variant, given, { rounds: true })
      const ties = [1, 1 + 2 ** -6, -1]
      expect([...y]).toEqual([nan, nan, infinity, -infinity, infinity, ...ties, 0, 0, 1 + 2 ** -7])
    })

    it('gives the same bits however y is divided, and for a row alone', () => {
      const given = randomMatrices(dense(61, 333, 777), 5)
      const whole = product(loaded, variant, given)
      const single: Tile[] = Array.from({ length: 61 }, (_, i) => [i, i + 1, 0, 333])
      const columns: Tile[] = [1, 17, 31, 100, 333].map((end, i, ends) => [
        0,
        61,
        i === 0 ? 0 : (ends[i - 1] as number),
        end,
      ])
      for (const tiles of [2, 3, 7, 16, single, columns]) {
        expect(product(loaded, variant, given, { tiles })).toEqual(whole)
      }
    })
  })

  it('gives the same bits however x is in parts', () => {
    const cuts = fc.array(fc.oneof(fc.nat(3), fc.nat(300)), { minLength: 1, maxLength: 6 })
    const [variant = ''] = loaded.variants
    fc.assert(
      fc.property(cuts, fc.boolean(), fc.nat(1e6), (parts, atEnd, seed) => {
        const k = parts.reduce((sum, columns) => sum + columns, 0)
        const given = randomMatrices({ ...dense(29, 40, k), xStride: k + 3 }, seed)
        expect(product(loaded, variant, given, { parts, atEnd, tiles: 2 })).toEqual(product(loaded, variant, given))
      }),
      { numRuns: 40 },
    )
  })

  it('gives the same bits with every instruction set that has fused multiply-add', () => {
    const given = randomMatrices(dense(31, 100, 1000), 9)
    const fused = loaded.variants.filter((variant) => variant !== 'baseline')
    const [first, ...others] = fused.map((variant) => product(loaded, variant, given))
    for (const other of others) expect(other).toEqual(first)
  })
})

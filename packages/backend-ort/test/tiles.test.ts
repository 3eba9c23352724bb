import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { type Tile, tilesOf } from '../src/lowering/tiles.ts'
import type { WeightDType } from '../src/weight-storage.ts'

const widths = fc.integer({ min: 1, max: 8192 })
const pieceRows = fc.array(fc.integer({ min: 1, max: 3000 }), { minLength: 1, maxLength: 6 })
const dtypes = fc.constantFrom<WeightDType>('float32', 'float16', 'bfloat16')

function tiles(dtype: WeightDType, pieces: readonly number[], width: number): readonly Tile[] {
  const rows = pieces.reduce((sum, count) => sum + count, 0)
  return tilesOf([rows, width], { dtype, pieces })
}

const rowsIn = (tile: Tile) => tile.reduce((sum, { start, end }) => sum + end - start, 0)

describe('the tiles of a weight', () => {
  it('are all its rows, in order, each from one piece', () => {
    fc.assert(
      fc.property(dtypes, pieceRows, widths, (dtype, pieces, width) => {
        const spans = tiles(dtype, pieces, width).flat()
        const ends = pieces.map((_, i) => pieces.slice(0, i + 1).reduce((sum, count) => sum + count, 0))
        expect(spans[0]?.start).toBe(0)
        expect(spans.at(-1)?.end).toBe(ends.at(-1))
        for (const [i, { start, end }] of spans.entries()) {
          expect(start).toBeLessThan(end)
          if (i > 0) expect(start).toBe(spans[i - 1]?.end)
          expect(ends.some((bound) => start < bound && bound < end)).toBe(false)
        }
      }),
    )
  })

  it('are cast in 4 MiB, or in 256 rows where these are more, but for whole groups of 16 rows', () => {
    fc.assert(
      fc.property(fc.constantFrom<WeightDType>('float16', 'bfloat16'), pieceRows, widths, (dtype, pieces, width) => {
        const most = Math.max(256, Math.floor((4 * 2 ** 20) / (4 * width)))
        for (const tile of tiles(dtype, pieces, width)) expect(rowsIn(tile)).toBeLessThanOrEqual(most + 16)
      }),
    )
  })

  it('are not slivers, which ORT would add up in another order', () => {
    fc.assert(
      fc.property(dtypes, pieceRows, widths, (dtype, pieces, width) => {
        const all = tiles(dtype, pieces, width)
        if (all.length === 1) return
        for (const [i, tile] of all.entries()) {
          expect(rowsIn(tile)).toBeGreaterThanOrEqual(128 - 16)
          if (i < all.length - 1) expect(tile.at(-1)?.end).toSatisfy((end: number) => end % 16 === 0)
        }
      }),
    )
  })

  it('end where long pieces end, so that nothing is joined', () => {
    // The local shard of klein's fused projection at degree 4: q, k, v, gate and up.
    const pieces = [768, 768, 768, 2304, 2304]
    expect(tiles('float32', pieces, 3072).map(rowsIn)).toEqual(pieces)
    const cast = tiles('bfloat16', pieces, 3072)
    expect(cast.every((tile) => tile.length === 1)).toBe(true)
    expect(cast.map(rowsIn).slice(0, 6)).toEqual([256, 256, 256, 256, 256, 256])
  })

  it('join short pieces', () => {
    expect(tiles('bfloat16', [96, 96, 96, 288, 288], 96)).toEqual([
      [
        { start: 0, end: 96 },
        { start: 96, end: 192 },
        { start: 192, end: 288 },
      ],
      [{ start: 288, end: 576 }],
      [{ start: 576, end: 864 }],
    ])
    expect(tiles('float16', [100, 100], 8)).toEqual([
      [
        { start: 0, end: 100 },
        { start: 100, end: 200 },
      ],
    ])
  })

  it('of float32 in one piece are the weight', () => {
    expect(tiles('float32', [27_648], 3072)).toEqual([[{ start: 0, end: 27_648 }]])
    expect(tilesOf([], { dtype: 'float32', pieces: [1] })).toEqual([[{ start: 0, end: 1 }]])
  })
})

import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import {
  formatPlacement,
  localShape,
  PARTIAL,
  type Placement,
  REPLICATED,
  type ShardSlices,
  samePlacement,
  shard,
  shardSlices,
} from '../src/placement.ts'
import { refusalOf } from './support.ts'

/** A degree, and blocks that it divides. */
const divisible = fc
  .integer({ min: 1, max: 8 })
  .chain((tpDegree) =>
    fc
      .array(fc.integer({ min: 1, max: 12 }), { minLength: 1, maxLength: 5 })
      .map((parts) => ({ tpDegree, blocks: parts.map((part) => part * tpDegree) })),
  )

function indices({ ranges }: ShardSlices): number[] {
  return ranges.flatMap(([start, end]) => Array.from({ length: end - start }, (_, i) => start + i))
}

function slicesOf(placement: Placement, tpDegree: number): number[][] {
  const size = placement.kind === 'shard' ? placement.blocks.reduce((sum, block) => sum + block, 0) : 0
  const all = Array.from({ length: size }, (_, i) => i)
  return Array.from({ length: tpDegree }, (_, rank) => {
    const slices = shardSlices(placement, rank, tpDegree)
    return slices === undefined ? all : indices(slices)
  })
}

describe('shardSlices', () => {
  it('takes the same fraction of every block', () => {
    expect(shardSlices(shard(1, [4, 8]), 0, 2)).toEqual({
      dim: 1,
      ranges: [
        [0, 2],
        [4, 8],
      ],
    })
    expect(shardSlices(shard(1, [4, 8]), 1, 2)).toEqual({
      dim: 1,
      ranges: [
        [2, 4],
        [8, 12],
      ],
    })
  })

  it('gives the ranks disjoint parts of equal size that cover everything', () => {
    fc.assert(
      fc.property(divisible, ({ tpDegree, blocks }) => {
        const ranks = slicesOf(shard(0, blocks), tpDegree)
        const size = blocks.reduce((sum, block) => sum + block, 0)
        expect(ranks.flat().sort((a, b) => a - b)).toEqual(Array.from({ length: size }, (_, i) => i))
        expect(ranks.map((rank) => rank.length)).toEqual(ranks.map(() => size / tpDegree))
      }),
    )
  })

  it('lists every part in ascending order', () => {
    fc.assert(
      fc.property(divisible, ({ tpDegree, blocks }) => {
        for (const rank of slicesOf(shard(0, blocks), tpDegree)) {
          expect(rank).toEqual([...rank].sort((a, b) => a - b))
        }
      }),
    )
  })

  it('splits each block by itself', () => {
    fc.assert(
      fc.property(divisible, ({ tpDegree, blocks }) => {
        for (const rank of slicesOf(shard(0, blocks), tpDegree)) {
          let start = 0
          for (const block of blocks) {
            const inBlock = rank.filter((index) => index >= start && index < start + block)
            expect(inBlock.length).toBe(block / tpDegree)
            start += block
          }
        }
      }),
    )
  })

  it('agrees with localShape', () => {
    fc.assert(
      fc.property(divisible, ({ tpDegree, blocks }) => {
        const size = blocks.reduce((sum, block) => sum + block, 0)
        const placement = shard(1, blocks)
        const [rank] = slicesOf(placement, tpDegree) as [number[]]
        expect(localShape([3, size, 2], placement, tpDegree)).toEqual([3, rank.length, 2])
      }),
    )
  })

  it('is undefined for whole values', () => {
    expect(shardSlices(REPLICATED, 1, 4)).toBeUndefined()
    expect(shardSlices(PARTIAL, 1, 4)).toBeUndefined()
    expect(shardSlices(shard(0, [7]), 0, 1)).toBeUndefined()
  })

  it('refuses a block that does not split evenly, naming it', () => {
    const error = refusalOf(() => shardSlices(shard(0, [8, 6]), 0, 4))
    expect(error.code).toBe('BLOCK_NOT_DIVISIBLE')
    expect(error.message).toContain('block of 6')
    expect(error.actual).toEqual({ block: 6, blocks: [8, 6], tpDegree: 4 })
  })
})

describe('localShape', () => {
  it('is the whole shape unless the value is sharded', () => {
    expect(localShape([2, 8], REPLICATED, 4)).toEqual([2, 8])
    expect(localShape([2, 8], PARTIAL, 4)).toEqual([2, 8])
    expect(localShape([2, 8], shard(1, [8]), 4)).toEqual([2, 2])
  })
})

it('prints placements', () => {
  expect([REPLICATED, PARTIAL, shard(2, [8]), shard(2, [64, 64, 192])].map(formatPlacement)).toEqual([
    'replicated',
    'partial(sum)',
    'shard(2)',
    'shard(2: 64|64|192)',
  ])
})

it('compares placements by kind, dimension and blocks', () => {
  const placements = [REPLICATED, PARTIAL, shard(0, [8]), shard(1, [8]), shard(1, [4, 4]), shard(1, [8, 4, 4])]
  for (const [i, a] of placements.entries()) {
    for (const [j, b] of placements.entries()) expect(samePlacement(a, structuredClone(b))).toBe(i === j)
  }
})

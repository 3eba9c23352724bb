import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { Embedding } from '../src/nn/embedding.ts'
import { Linear } from '../src/nn/linear.ts'
import { REPLICATED, shard } from '../src/placement.ts'
import {
  colwiseHeads,
  type ParallelStyle,
  packedColwise,
  packedRowwise,
  placeEmbedding,
  placeLinear,
} from '../src/styles.ts'
import { refusalOf } from './support.ts'

const linear = new Linear(12, 24)

/** Placements of weight and bias, and whether the input is split. */
function place(style: unknown, target = linear) {
  const { weight, bias } = placeLinear(style as ParallelStyle, target, 'ff.proj')
  expect(bias.splitInput && weight.placement.kind === 'replicated').toBe(false)
  return { weight: weight.placement, bias: bias.placement, splitInput: weight.splitInput }
}

describe('placeLinear', () => {
  it('colwise deals out the rows of the weight and the bias with them', () => {
    expect(place('colwise')).toEqual({ weight: shard(0, [24]), bias: shard(0, [24]), splitInput: false })
  })

  it('rowwise deals out the columns of the weight and keeps the bias whole', () => {
    expect(place('rowwise')).toEqual({ weight: shard(1, [12]), bias: REPLICATED, splitInput: false })
  })

  it('rowwise_split_input asks for a slice of its input', () => {
    expect(place('rowwise_split_input')).toEqual({ weight: shard(1, [12]), bias: REPLICATED, splitInput: true })
  })

  it('packedColwise and packedRowwise scale proportions to the dimension', () => {
    expect(place(packedColwise([1, 1]))).toMatchObject({ weight: shard(0, [12, 12]), bias: shard(0, [12, 12]) })
    expect(place(packedColwise([1, 1, 6]))).toMatchObject({ weight: shard(0, [3, 3, 18]) })
    expect(place(packedRowwise([1, 2]))).toEqual({ weight: shard(1, [4, 8]), bias: REPLICATED, splitInput: false })
  })

  it('packed styles without blocks take those of the Linear', () => {
    const packed = new Linear(12, 24, { packedColBlocks: [8, 16], packedRowBlocks: [2, 10] })
    expect(place(packedColwise(), packed)).toMatchObject({ weight: shard(0, [8, 16]) })
    expect(place(packedRowwise(), packed)).toMatchObject({ weight: shard(1, [2, 10]) })
    expect(place(packedColwise([1, 2, 1]), packed)).toMatchObject({ weight: shard(0, [6, 12, 6]) })
  })

  it('packed blocks keep their proportions and fill the dimension', () => {
    fc.assert(
      fc.property(
        fc.array(fc.integer({ min: 1, max: 9 }), { minLength: 1, maxLength: 5 }),
        fc.integer({ min: 1, max: 9 }),
        (proportions, unit) => {
          const rows = proportions.reduce((sum, part) => sum + part, 0) * unit
          const { weight } = place(packedColwise(proportions), new Linear(1, rows))
          expect(weight).toEqual(
            shard(
              0,
              proportions.map((part) => part * unit),
            ),
          )
        },
      ),
    )
  })

  it.each([
    ['packedColwise', packedColwise(), 'packedColBlocks'],
    ['packedRowwise', packedRowwise(), 'packedRowBlocks'],
    ['packedColwise of no blocks', packedColwise([]), 'packedColBlocks'],
  ])('refuses %s when nobody gives blocks', (_name, style, property) => {
    const error = refusalOf(() => place(style))
    expect(error.code).toBe('PACKED_BLOCKS_MISSING')
    expect(error.where).toBe('ff.proj')
    expect(error.message).toContain(property)
  })

  it.each([
    ['do not divide the dimension', packedColwise([2, 3])],
    ['are larger than the dimension', packedRowwise([12, 12])],
    ['are not whole', packedColwise([1.5, 1.5])],
    ['are not positive', packedColwise([4, 0])],
    ['cancel out', packedColwise([4, -2])],
    ['are not numbers', packedColwise([Number.NaN])],
  ])('refuses blocks that %s', (_name, style) => {
    const error = refusalOf(() => place(style))
    expect(error.code).toBe('PACKED_BLOCKS_SUM')
    expect(error.where).toBe('ff.proj')
    expect(error.actual).toMatchObject({ blocks: style.blocks })
  })

  it('colwiseHeads deals out heads, those of the style or of the Linear', () => {
    const keys = new Linear(12, 24, { heads: 6 })
    expect(place(colwiseHeads(), keys)).toMatchObject({ weight: shard(0, [24], 6), bias: shard(0, [24], 6) })
    expect(place(colwiseHeads(3), keys)).toMatchObject({ weight: shard(0, [24], 3) })
  })

  it.each([[undefined], [5], [0], [-2], [1.5], [48]])('refuses %s heads of 24 rows', (heads) => {
    expect(refusalOf(() => place(colwiseHeads(heads)))).toMatchObject({
      code: 'STYLE_HEADS',
      where: 'ff.proj',
      actual: { rows: 24, heads },
    })
  })

  it.each([['columnwise'], [undefined], [null], [{ kind: 'packed' }], [3]])('refuses the style %j', (style) => {
    const error = refusalOf(() => place(style))
    expect(error.code).toBe('STYLE_UNKNOWN')
    expect(error.where).toBe('ff.proj')
    expect(error.rule).toContain('rowwise_split_input')
  })
})

describe('placeEmbedding', () => {
  const table = new Embedding(1005, 32)

  it('colwise deals out the columns of the table', () => {
    expect(placeEmbedding('colwise', table, 'embed')).toEqual({ placement: shard(1, [32]), splitInput: false })
  })

  it.each([['rowwise'], [packedColwise([1, 1])], [colwiseHeads(2)], ['diagonal']])('refuses %j', (style) => {
    const error = refusalOf(() => placeEmbedding(style as ParallelStyle, table, 'embed'))
    expect(error).toMatchObject({ code: 'STYLE_EMBEDDING', where: 'embed' })
  })
})

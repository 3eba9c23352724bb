import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { Module, ModuleList } from '../src/module.ts'
import { Linear } from '../src/nn/linear.ts'
import { LayerNorm } from '../src/nn/norm.ts'
import { REPLICATED, shard, shardSlices } from '../src/placement.ts'
import {
  checkDegree,
  legalDegrees,
  type ParameterPlacements,
  resolvePlan,
  type TensorParallelPlan,
} from '../src/plan.ts'
import { type ParallelStyle, packedColwise } from '../src/styles.ts'
import { codeOf, refusalOf } from './support.ts'

class Attention extends Module {
  readonly to_q = new Linear(8, 8)
  readonly to_out = new ModuleList([new Linear(8, 8, { bias: false })])

  override forward(): never {
    throw new Error('not run')
  }
}

class Block extends Module {
  readonly norm = new LayerNorm(8)
  readonly attn = new Attention()

  override forward(): never {
    throw new Error('not run')
  }
}

class Model extends Module {
  readonly proj = new Linear(8, 12)
  readonly blocks = new ModuleList([new Block(), new Block(), new Block()])
  readonly none = new ModuleList<Block>([])

  override forward(): never {
    throw new Error('not run')
  }
}

const model = new Model()

const placementsOf = (plan: TensorParallelPlan) =>
  Object.fromEntries([...resolvePlan(model, plan)].map(([name, { placement }]) => [name, placement]))

describe('resolvePlan', () => {
  it('names weights and biases by their path', () => {
    expect(placementsOf({ proj: 'colwise' })).toEqual({ 'proj.weight': shard(0, [12]), 'proj.bias': shard(0, [12]) })
    expect(placementsOf({ proj: 'rowwise' })).toEqual({ 'proj.weight': shard(1, [8]), 'proj.bias': REPLICATED })
  })

  it('leaves out the bias that a Linear does not have', () => {
    expect(placementsOf({ 'blocks.1.attn.to_out.0': 'rowwise' })).toEqual({
      'blocks.1.attn.to_out.0.weight': shard(1, [8]),
    })
  })

  it('expands a wildcard over a ModuleList', () => {
    expect(Object.keys(placementsOf({ 'blocks.*.attn.to_q': 'colwise' }))).toEqual(
      [0, 1, 2].flatMap((i) => [`blocks.${i}.attn.to_q.weight`, `blocks.${i}.attn.to_q.bias`]),
    )
    expect(Object.keys(placementsOf({ 'blocks.2.attn.to_out.*': 'rowwise' }))).toEqual([
      'blocks.2.attn.to_out.0.weight',
    ])
    expect(placementsOf({ 'none.*.attn.to_q': 'colwise' })).toEqual({})
  })

  it('keeps the placements of a style', () => {
    expect(placementsOf({ proj: packedColwise([1, 2]) })['proj.weight']).toEqual(shard(0, [4, 8]))
    expect(resolvePlan(model, { proj: 'rowwise_split_input' }).get('proj.weight')?.splitInput).toBe(true)
  })

  it.each<[code: string, key: string, where: string]>([
    ['PLAN_WILDCARDS', 'blocks.*.attn.to_out.*', 'blocks.*.attn.to_out.*'],
    ['PLAN_WILDCARD_LIST', 'proj.*', 'proj'],
    ['PLAN_WILDCARD_LIST', '*.proj', '(model)'],
    ['PLAN_WILDCARD_LIST', 'blocks.0.*', 'blocks.0'],
    ['PLAN_PATH', 'blocks.*.attn.to_x', 'blocks.0.attn.to_x'],
    ['PLAN_PATH', 'missing.*.attn', 'missing'],
    ['PLAN_PATH', 'blocks.3.attn.to_q', 'blocks.3.attn.to_q'],
    ['PLAN_PATH', 'blocks*.attn.to_q', 'blocks0.attn.to_q'],
    ['PLAN_PATH', 'proj.weight', 'proj.weight'],
    ['PLAN_PATH', 'Model.proj', 'Model.proj'],
    ['PLAN_NOT_LINEAR', 'blocks.*.norm', 'blocks.0.norm'],
    ['PLAN_NOT_LINEAR', 'blocks', 'blocks'],
    ['PLAN_NOT_LINEAR', '', ''],
  ])('refuses with %s the key %j', (code, key, where) => {
    const error = refusalOf(() => resolvePlan(model, { [key]: 'colwise' }))
    expect(error.code).toBe(code)
    expect(error.where).toBe(where)
    expect(error.message).toContain(`'${key}'`)
    expect(error.rule).toBeTruthy()
  })

  it('names the Linear that a style does not suit', () => {
    const unknown = refusalOf(() => resolvePlan(model, { 'blocks.*.attn.to_q': 'col' as ParallelStyle }))
    expect(unknown).toMatchObject({ code: 'STYLE_UNKNOWN', where: 'blocks.0.attn.to_q' })
    const blocks = refusalOf(() => resolvePlan(model, { proj: packedColwise([5, 2]) }))
    expect(blocks).toMatchObject({ code: 'PACKED_BLOCKS_SUM', where: 'proj' })
    const missing = refusalOf(() => resolvePlan(model, { proj: packedColwise() }))
    expect(missing).toMatchObject({ code: 'PACKED_BLOCKS_MISSING', where: 'proj' })
  })
})

function placementsOfBlocks(blocks: readonly number[]): ParameterPlacements {
  return new Map([['ff.weight', { placement: shard(0, blocks), splitInput: false }]])
}

describe('legalDegrees', () => {
  it('are the common divisors of the heads and every block', () => {
    expect(legalDegrees(placementsOfBlocks([24, 36]), 18)).toEqual([1, 2, 3, 6])
    expect(legalDegrees(placementsOfBlocks([24, 36]), undefined)).toEqual([1, 2, 3, 4, 6, 12])
    expect(legalDegrees(new Map(), 4)).toEqual([1, 2, 4])
    expect(legalDegrees(new Map(), undefined)).toEqual([1])
    expect(legalDegrees(new Map([['b', { placement: REPLICATED, splitInput: false }]]), undefined)).toEqual([1])
  })

  it('are those that checkDegree accepts and that shardSlices can slice', () => {
    fc.assert(
      fc.property(
        fc.array(fc.integer({ min: 1, max: 48 }), { minLength: 1, maxLength: 4 }),
        fc.integer({ min: 1, max: 24 }),
        (blocks, heads) => {
          const placements = placementsOfBlocks(blocks)
          const degrees = Array.from({ length: 64 }, (_, i) => i + 1)
          const accepted = degrees.filter(
            (degree) => codeOf(() => checkDegree(placements, heads, degree)) === undefined,
          )
          expect(legalDegrees(placements, heads)).toEqual(accepted)
          for (const degree of accepted) expect(codeOf(() => shardSlices(shard(0, blocks), 0, degree))).toBeUndefined()
        },
      ),
    )
  })
})

describe('checkDegree', () => {
  it.each([0, -1, 1.5, Number.NaN, Number.POSITIVE_INFINITY])('refuses the degree %s', (degree) => {
    expect(codeOf(() => checkDegree(new Map(), 4, degree))).toBe('TP_DEGREE_INVALID')
  })

  it('refuses heads that do not divide, with the degrees that do', () => {
    const error = refusalOf(() => checkDegree(placementsOfBlocks([12]), 4, 3))
    expect(error).toMatchObject({
      code: 'HEADS_NOT_DIVISIBLE',
      actual: { heads: 4, tpDegree: 3, legalDegrees: [1, 2, 4] },
    })
    expect(error.remedy).toContain('1, 2, 4')
  })

  it('refuses a block that does not divide, naming the weight, although the whole dimension divides', () => {
    const error = refusalOf(() => checkDegree(placementsOfBlocks([12, 10, 10]), 4, 4))
    expect(error).toMatchObject({
      code: 'BLOCK_NOT_DIVISIBLE',
      where: 'ff.weight',
      actual: { block: 10, dim: 0, blocks: [12, 10, 10], tpDegree: 4, legalDegrees: [1, 2] },
    })
  })

  it('accepts what divides', () => {
    expect(codeOf(() => checkDegree(placementsOfBlocks([12, 8]), 4, 4))).toBeUndefined()
  })
})

describe('a module that is used in two places', () => {
  class Twice extends Module {
    readonly first = new Linear(4, 8)
    readonly again: Linear = this.first

    override forward(): never {
      throw new Error('unused')
    }
  }

  it('has one name, and a plan may use either path', () => {
    const model = new Twice()
    expect([...model.namedParameters()].map(([name]) => name)).toEqual(['first.weight', 'first.bias'])
    expect([...resolvePlan(model, { again: 'colwise' }).keys()]).toEqual(['first.weight', 'first.bias'])
  })

  it('is placed by one key', () => {
    const refused = { code: 'PLAN_DUPLICATE', where: 'first.weight' }
    expect(() => resolvePlan(new Twice(), { first: 'colwise', again: 'rowwise' })).toThrow(
      expect.objectContaining(refused),
    )
  })
})

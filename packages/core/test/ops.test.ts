import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import type { DType } from '../src/dtype.ts'
import type { Attributes } from '../src/graph.ts'
import { opDefinition, opNames } from '../src/op.ts'
import { formatPlacement, PARTIAL, type Placement, REPLICATED, shard } from '../src/placement.ts'
import { codeOf, refusalOf } from './support.ts'
import {
  combinations,
  type OpCall,
  outputTypes,
  type Placed,
  placementError,
  placementFrom,
  placementsAtTwo,
  placeOp,
} from './support-op.ts'

/**
 * The placement rule of one operation, written out. `legal` has a row for every legal combination of operands:
 * `operands -> results`. `C` stands for a complete operand: replicated, or partial and summed first. A later row for the
 * same operands replaces an earlier one. Every combination without a row is refused with the code that `refusal` gives.
 */
interface Rule extends OpCall {
  readonly title: string
  readonly legal: readonly string[]
  readonly refusal: (placements: readonly string[]) => string
}

const always = (code: string) => () => code

const same = ['S0 S0 -> S0', 'S0* S0* -> S0*', 'S1 S1 -> S1', 'S1* S1* -> S1*']
const bothPartial = ['C C -> R', 'P P -> P']

const BINARY: readonly { readonly op: string; readonly whole: readonly string[] }[] = [
  { op: 'add', whole: bothPartial },
  { op: 'sub', whole: bothPartial },
  { op: 'mul', whole: ['C C -> R', 'P R -> P', 'R P -> P'] },
  { op: 'div', whole: ['C C -> R', 'P R -> P'] },
]

const binaryRules: readonly Rule[] = BINARY.flatMap(({ op, whole }) => {
  const refusal = always('PLACEMENT_ELEMENTWISE')
  return [
    {
      title: `${op}, same shapes`,
      op,
      shapes: [
        [8, 16],
        [8, 16],
      ],
      legal: [...whole, ...same],
      refusal,
    },
    {
      title: `${op}, second of lower rank`,
      op,
      shapes: [[8, 16], [16]],
      legal: [...whole, 'S1 S0 -> S1', 'S1* S0* -> S1*', 'S0 C -> S0', 'S0* C -> S0*'],
      refusal,
    },
    {
      title: `${op}, first of lower rank`,
      op,
      shapes: [[16], [8, 16]],
      legal: [...whole, 'S0 S1 -> S1', 'S0* S1* -> S1*', 'C S0 -> S0', 'C S0* -> S0*'],
      refusal,
    },
    {
      title: `${op}, size 1`,
      op,
      shapes: [
        [8, 16],
        [8, 1],
      ],
      legal: [...whole, 'S0 S0 -> S0', 'S0* S0* -> S0*', 'S1 C -> S1', 'S1* C -> S1*'],
      refusal,
    },
    {
      title: `${op}, each repeats the other`,
      op,
      shapes: [
        [8, 1],
        [1, 16],
      ],
      legal: [...whole, 'S0 C -> S0', 'S0* C -> S0*', 'C S1 -> S1', 'C S1* -> S1*'],
      refusal,
    },
  ]
})

const shardsStay = ['S0 -> S0', 'S0* -> S0*', 'S1 -> S1', 'S1* -> S1*']

const UNARY: Readonly<Record<string, Attributes>> = {
  ...{ silu: {}, sin: {}, cos: {}, cast: { dtype: 'float32' } },
  ...{ add_scalar: { value: 1.5 }, mul_scalar: { value: 1.5 } },
}

const unaryRules: readonly Rule[] = Object.entries(UNARY).map(([op, attributes]) => ({
  title: op,
  op,
  shapes: [[8, 16]],
  attributes,
  legal: [...(op === 'mul_scalar' ? ['R -> R', 'P -> P'] : ['C -> R']), ...shardsStay],
  refusal: always('never'),
}))

/** What is in 16 bits is summed before it is rounded by anything else. */
const roundedRules: readonly Rule[] = [
  ...BINARY.map(({ op }) => ({
    title: `${op} in bfloat16`,
    op,
    shapes: [
      [8, 16],
      [8, 16],
    ],
    dtypes: ['bfloat16', 'bfloat16'] as const,
    legal: ['C C -> R', ...same],
    refusal: always('PLACEMENT_ELEMENTWISE'),
  })),
  {
    title: 'mul_scalar in float16',
    op: 'mul_scalar',
    shapes: [[8, 16]],
    dtypes: ['float16'],
    attributes: { value: 1.5 },
    legal: ['C -> R', ...shardsStay],
    refusal: always('never'),
  },
]

const linearRules: readonly Rule[] = [
  {
    title: 'linear',
    op: 'linear',
    shapes: [
      [8, 8, 16],
      [24, 16],
    ],
    legal: [
      'C C -> R',
      ...['S0', 'S0*', 'S1', 'S1*'].map((x) => `${x} C -> ${x}`),
      'C S0 -> S2',
      'C S0* -> S2*',
      'S2 S1 -> P',
      'S2* S1* -> P',
    ],
    refusal: ([x, weight]) => {
      if (weight?.startsWith('S0')) return 'PLACEMENT_COLWISE_INPUT'
      if (!weight?.startsWith('S1')) return 'PLACEMENT_REPLICATED_WEIGHT'
      return x?.startsWith('S2') ? 'PLACEMENT_ROWWISE_BLOCKS' : 'PLACEMENT_ROWWISE_INPUT'
    },
  },
  {
    title: 'linear with rowwise_split_input',
    op: 'linear',
    splitInput: true,
    shapes: [
      [8, 16],
      [8, 16],
    ],
    legal: ['C C -> R', 'S0 C -> S0', 'S0* C -> S0*', 'C S0 -> S1', 'C S0* -> S1*']
      .concat(['C S1 -> P', 'C S1* -> P'])
      .concat(['S1 S1 -> P', 'S1* S1* -> P']),
    refusal: ([x, weight]) => {
      if (weight?.startsWith('S0')) return 'PLACEMENT_COLWISE_INPUT'
      if (!weight?.startsWith('S1')) return 'PLACEMENT_REPLICATED_WEIGHT'
      return x?.startsWith('S1') ? 'PLACEMENT_ROWWISE_BLOCKS' : 'PLACEMENT_ROWWISE_INPUT'
    },
  },
  {
    title: 'embedding',
    op: 'embedding',
    shapes: [
      [2, 8],
      [8, 16],
    ],
    dtypes: ['int32', 'float64'],
    legal: ['R R -> R', 'R S1 -> P'],
    refusal: always('PLACEMENT_EMBEDDING'),
  },
]

const movementRules: readonly Rule[] = [
  reshapeRule(
    'splits a dimension',
    [8, 16, 8],
    [8, 4, 4, 8],
    [
      'S0 -> S0',
      'S0* -> S0*',
      'S1 -> S1',
      // S1* is 4|12: its blocks are 1 and 3 of the new dimension, which two ranks cannot share.
      'S2 -> S3',
      'S2* -> S3*',
    ],
  ),
  reshapeRule(
    'splits a dimension of several blocks',
    [8, 32],
    [8, 8, 4],
    ['S0 -> S0', 'S0* -> S0*', 'S1 -> S1', 'S1* -> S1*'],
  ),
  reshapeRule('joins the last dimensions', [8, 16, 8], [8, 128], ['S0 -> S0', 'S0* -> S0*', 'S1 -> S1', 'S1* -> S1*']),
  reshapeRule('joins the first dimensions', [8, 16, 8], [128, 8], ['S0 -> S0', 'S0* -> S0*', 'S2 -> S1', 'S2* -> S1*']),
  reshapeRule('inserts a dimension of size 1', [8, 16], [8, 1, 16], shardsThat({ S0: 'S0', S1: 'S2' })),
  reshapeRule('prepends a dimension of size 1', [8, 16], [1, 8, 16], shardsThat({ S0: 'S1', S1: 'S2' })),
  reshapeRule('drops a dimension of size 1', [8, 1, 16], [8, 16], shardsThat({ S0: 'S0', S2: 'S1' })),
  reshapeRule('splits heads of one token of one batch', [1, 1, 32], [1, 1, 8, 4], shardsThat({ S2: 'S2' })),
  reshapeRule('joins heads of one token of one batch', [1, 1, 8, 4], [1, 1, 32], shardsThat({ S2: 'S2' })),
  reshapeRule(
    'keeps a single head with its features',
    [2, 3, 8],
    [2, 3, 1, 8],
    shardsThat({ S0: 'S0', S2: 'S3' }, 'S0'),
  ),
  reshapeRule('regroups', [8, 16], [16, 8], ['S0 -> S0', 'S0* -> S0*']),
  {
    title: 'transpose',
    op: 'transpose',
    shapes: [[8, 16, 24]],
    attributes: { permutation: [2, 0, 1] },
    legal: ['R -> R', 'P -> P', ...shardsThat({ S0: 'S1', S1: 'S2', S2: 'S0' })],
    refusal: always('never'),
  },
  {
    title: 'split',
    op: 'split',
    shapes: [[8, 16]],
    attributes: { dim: 1, sizes: [4, 12] },
    legal: ['R -> R R', 'P -> P P', 'S0 -> S0 S0', 'S0* -> S0* S0*', 'S1* -> S1 S1'],
    refusal: always('PLACEMENT_SPLIT_BLOCK'),
  },
  {
    title: 'split into one piece of two blocks',
    op: 'split',
    shapes: [[16, 8]],
    attributes: { dim: 0, sizes: [16] },
    legal: ['R -> R', 'P -> P', ...shardsStay],
    refusal: always('never'),
  },
  {
    title: 'split with an empty piece',
    op: 'split',
    shapes: [[16]],
    attributes: { dim: 0, sizes: [0, 16] },
    legal: ['R -> R R', 'P -> P P', 'S0 -> S0[] S0', 'S0* -> S0[] S0*'],
    refusal: always('never'),
  },
  {
    title: 'concat',
    op: 'concat',
    shapes: [
      [8, 16],
      [8, 8],
    ],
    attributes: { dim: 1 },
    legal: [
      ...bothPartial,
      'S0 S0 -> S0',
      'S0* S0* -> S0*',
      'S1 S1 -> S1[16|8]',
      'S1* S1 -> S1[4|12|8]',
      'S1 S1* -> S1[16|2|6]',
      'S1* S1* -> S1[4|12|2|6]',
    ],
    refusal: always('PLACEMENT_CONCAT'),
  },
  {
    title: 'concat of three',
    op: 'concat',
    shapes: [[8], [8], [8]],
    attributes: { dim: 0 },
    legal: [
      'C C C -> R',
      'P P P -> P',
      'S0 S0 S0 -> S0[8|8|8]',
      'S0* S0 S0 -> S0[2|6|8|8]',
      'S0 S0* S0 -> S0[8|2|6|8]',
      'S0 S0 S0* -> S0[8|8|2|6]',
      'S0* S0* S0 -> S0[2|6|2|6|8]',
      'S0* S0 S0* -> S0[2|6|8|2|6]',
      'S0 S0* S0* -> S0[8|2|6|2|6]',
      'S0* S0* S0* -> S0[2|6|2|6|2|6]',
    ],
    refusal: always('PLACEMENT_CONCAT'),
  },
  {
    title: 'shard',
    op: 'shard',
    shapes: [[8, 16]],
    attributes: { dim: 1, blocks: [4, 12] },
    legal: ['C -> S1*'],
    refusal: always('PLACEMENT_SHARD'),
  },
]

function reshapeRule(title: string, from: readonly number[], to: readonly number[], shards: readonly string[]): Rule {
  return {
    title: `reshape ${title}`,
    op: 'reshape',
    shapes: [from],
    attributes: { shape: to },
    legal: ['R -> R', 'P -> P', ...shards],
    refusal: always('PLACEMENT_RESHAPE'),
  }
}

/** Rows for shards of one and of two blocks; `single` has an odd number of elements in a block of two. */
function shardsThat(moves: Readonly<Record<string, string>>, single?: string): string[] {
  return Object.entries(moves).flatMap(([from, to]) =>
    from === single ? [`${from} -> ${to}`] : [`${from} -> ${to}`, `${from}* -> ${to}*`],
  )
}

function normRule(op: string, weights: number): Rule {
  const replicated = new Array(weights).fill('R')
  const row = (x: string, result: string) => `${[x, ...replicated].join(' ')} -> ${result}`
  return {
    title: `${op} with ${weights} weights`,
    op,
    shapes: [[8, 16, 8], ...new Array(weights).fill([8])],
    attributes: { eps: 1e-6 },
    legal: [row('C', 'R'), ...['S0', 'S0*', 'S1', 'S1*'].map((x) => row(x, x))],
    refusal: ([x]) => (x?.startsWith('S2') ? 'PLACEMENT_NORM' : 'PLACEMENT_NORM_WEIGHT'),
  }
}

const attentionRules: readonly Rule[] = [
  {
    title: 'attention',
    op: 'attention',
    shapes: [
      [8, 8, 8, 8],
      [8, 8, 8, 8],
      [8, 8, 8, 8],
    ],
    attributes: { scale: 0.5, causal: false },
    legal: ['C C C -> R', 'S2 S2 S2 -> S2'],
    refusal: always('PLACEMENT_ATTENTION'),
  },
  {
    title: 'attention with grouped heads and a bias',
    op: 'attention',
    shapes: [
      [2, 3, 8, 4],
      [2, 5, 4, 4],
      [2, 5, 4, 6],
      [1, 1, 3, 5],
    ],
    attributes: { scale: 0.5, causal: false },
    legal: ['C C C C -> R', 'S2 S2 S2 C -> S2'],
    refusal: always('PLACEMENT_ATTENTION'),
  },
  {
    title: 'attention with a bias per batch, causal',
    op: 'attention',
    shapes: [
      [2, 4, 2, 4],
      [2, 4, 2, 4],
      [2, 4, 2, 4],
      [2, 1, 4, 4],
    ],
    attributes: { scale: 0.5, causal: true },
    legal: ['C C C C -> R', 'S2 S2 S2 C -> S2'],
    refusal: always('PLACEMENT_ATTENTION'),
  },
  {
    title: 'rope',
    op: 'rope',
    shapes: [
      [8, 8, 8, 8],
      [8, 4],
      [8, 4],
    ],
    attributes: { interleaved: true },
    legal: ['C C C -> R', ...['S0', 'S0*', 'S2', 'S2*'].map((x) => `${x} C C -> ${x}`)],
    refusal: always('PLACEMENT_ROPE'),
  },
]

const spatialRules: readonly Rule[] = [
  {
    title: 'group_norm',
    op: 'group_norm',
    shapes: [[2, 8, 4, 4], [8], [8]],
    attributes: { groups: 2, eps: 1e-6 },
    legal: ['C C C -> R'],
    refusal: always('PLACEMENT_REPLICATED_ONLY'),
  },
  {
    title: 'conv2d',
    op: 'conv2d',
    shapes: [[2, 4, 4, 4], [8, 4, 2, 2], [8]],
    attributes: { stride: 1, padding: [1, 0, 1, 0] },
    legal: ['C C C -> R'],
    refusal: always('PLACEMENT_REPLICATED_ONLY'),
  },
  {
    title: 'upsample_nearest2d',
    op: 'upsample_nearest2d',
    shapes: [[2, 8, 4, 4]],
    attributes: { scale: 2 },
    legal: ['C -> R'],
    refusal: always('PLACEMENT_REPLICATED_ONLY'),
  },
]

const RULES: readonly Rule[] = [
  ...binaryRules,
  ...unaryRules,
  ...roundedRules,
  ...linearRules,
  ...movementRules,
  normRule('layer_norm', 0),
  normRule('layer_norm', 1),
  normRule('layer_norm', 2),
  normRule('rms_norm', 0),
  normRule('rms_norm', 1),
  ...attentionRules,
  ...spatialRules,
]

/** The table of a rule: results by operands, `C` spelled out. */
function expectations(legal: readonly string[]): Map<string, { results: string[]; sums: number[] }> {
  const table = new Map<string, { results: string[]; sums: number[] }>()
  for (const row of legal) {
    const [operands = '', results = ''] = row.split(' -> ')
    const choices = operands.split(' ').map((operand) => (operand === 'C' ? ['R', 'P!'] : [operand]))
    for (const choice of combinations(choices)) {
      table.set(choice.join(' ').replaceAll('!', ''), {
        results: results.split(' '),
        sums: choice.flatMap((operand, i) => (operand === 'P!' ? [i] : [])),
      })
    }
  }
  return table
}

function inShort(call: OpCall, texts: readonly string[]): Placement[] {
  return texts.map((text, i) => placementFrom(text, call.shapes[i] as readonly number[]))
}

const format = (placements: readonly Placement[]) => placements.map(formatPlacement).join(' ')

describe.each(RULES)('$title', (rule) => {
  const table = expectations(rule.legal)
  const combinationsOfAll = combinations(rule.shapes.map(placementsAtTwo))
  const isLegal = (texts: readonly string[]) => table.has(texts.join(' '))

  it('places every legal combination as documented', () => {
    for (const texts of combinationsOfAll.filter(isLegal)) {
      const expected = table.get(texts.join(' '))
      const placed = placeOp(rule, inShort(rule, texts), 2)
      const types = outputTypes(rule)
      const results = expected?.results.map((text, i) => placementFrom(text, types[i]?.shape ?? []))
      expect(`${texts.join(' ')} -> ${format(placed.outputs)}`).toBe(`${texts.join(' ')} -> ${format(results ?? [])}`)
      expect(placed.sums, texts.join(' ')).toEqual(expected?.sums)
    }
  })

  it('lists only combinations that exist', () => {
    const all = new Set(combinationsOfAll.map((texts) => texts.join(' ')))
    expect([...table.keys()].filter((operands) => !all.has(operands))).toEqual([])
  })

  it('refuses every other combination, saying where, what and why', () => {
    for (const texts of combinationsOfAll.filter((candidate) => !isLegal(candidate))) {
      const placements = inShort(rule, texts)
      const error = refusalOf(() => placeOp(rule, placements, 2, 'blocks.3.attn'))
      expect(`${texts.join(' ')}: ${error.code}`).toBe(`${texts.join(' ')}: ${rule.refusal(texts)}`)
      expect(error.where).toBe('blocks.3.attn')
      const [headline] = error.message.split('\n')
      const operands = placements.map((placement, i) => `operand${i} ${formatPlacement(placement)}`).join(', ')
      expect(headline).toBe(`[${error.code}] blocks.3.attn: ${rule.op} cannot run on these placements: ${operands}`)
      expect(error.actual).toMatchObject({ op: rule.op, tpDegree: 2 })
      expect(error.rule).toBeTruthy()
      expect(error.remedy).toBeTruthy()
    }
  })

  it('computes the right values on every legal combination', () => {
    for (const texts of combinationsOfAll.filter(isLegal)) {
      const placements = inShort(rule, texts)
      const error = placementError(rule, placements, placeOp(rule, placements, 2), 2)
      expect(error, texts.join(' ')).toBeLessThan(1e-12)
    }
  })
})

it('covers every operation', () => {
  const covered = new Set(RULES.map(({ op }) => op))
  expect(opNames().filter((op) => !covered.has(op))).toEqual(['all_reduce'])
})

it('all_reduce takes partial values only', () => {
  const call = { op: 'all_reduce', shapes: [[8], [8, 8]] }
  expect(placeOp(call, [PARTIAL, PARTIAL], 2).outputs).toEqual([REPLICATED, REPLICATED])
  expect(codeOf(() => placeOp(call, [PARTIAL, REPLICATED], 2))).toBe('PLACEMENT_ALL_REDUCE')
  expect(codeOf(() => placeOp(call, [shard(0, [8]), PARTIAL], 2))).toBe('PLACEMENT_ALL_REDUCE')
})

describe('the simulator notices a rule that', () => {
  const placed = (...outputs: Placement[]): Placed => ({ outputs, sums: [], splits: new Map() })
  const wrong: readonly (readonly [title: string, call: OpCall, placements: Placement[], outputs: Placement[]])[] = [
    ['keeps a partial through silu', { op: 'silu', shapes: [[8]] }, [PARTIAL], [PARTIAL]],
    [
      'adds a number to every summand',
      { op: 'add_scalar', shapes: [[8]], attributes: { value: 1 } },
      [PARTIAL],
      [PARTIAL],
    ],
    ['adds a bias to every summand', { op: 'add', shapes: [[8], [8]] }, [PARTIAL, REPLICATED], [PARTIAL]],
    ['multiplies two sums summand by summand', { op: 'mul', shapes: [[8], [8]] }, [PARTIAL, PARTIAL], [PARTIAL]],
    ['divides by a partial', { op: 'div', shapes: [[8], [8]] }, [REPLICATED, PARTIAL], [PARTIAL]],
    [
      'adds operands of different blocks',
      { op: 'add', shapes: [[8], [8]] },
      [shard(0, [8]), shard(0, [4, 4])],
      [shard(0, [8])],
    ],
    [
      'normalises across a shard',
      { op: 'rms_norm', shapes: [[8, 8]], attributes: { eps: 0 } },
      [shard(1, [8])],
      [shard(1, [8])],
    ],
    [
      'takes a partial weight for a whole one',
      {
        op: 'linear',
        shapes: [
          [8, 8],
          [8, 8],
        ],
      },
      [REPLICATED, PARTIAL],
      [REPLICATED],
    ],
    [
      'contracts features of different blocks',
      {
        op: 'linear',
        shapes: [
          [8, 8],
          [8, 8],
        ],
      },
      [shard(1, [8]), shard(1, [4, 4])],
      [PARTIAL],
    ],
    [
      'splits a plain shard',
      { op: 'split', shapes: [[8, 16]], attributes: { dim: 1, sizes: [8, 8] } },
      [shard(1, [16])],
      [shard(1, [8]), shard(1, [8])],
    ],
    [
      'forgets the blocks of joined shards',
      { op: 'concat', shapes: [[8], [8]], attributes: { dim: 0 } },
      [shard(0, [8]), shard(0, [8])],
      [shard(0, [16])],
    ],
    [
      'reshapes across heads',
      { op: 'reshape', shapes: [[2, 4, 4]], attributes: { shape: [8, 4] } },
      [shard(1, [4])],
      [shard(0, [8])],
    ],
    [
      'shards grouped heads in several blocks',
      {
        op: 'attention',
        shapes: [
          [1, 3, 8, 4],
          [1, 3, 4, 4],
          [1, 3, 4, 4],
        ],
        attributes: { scale: 1, causal: false },
      },
      [shard(2, [4, 4]), shard(2, [4]), shard(2, [4])],
      [shard(2, [4, 4])],
    ],
    [
      'shards the keys',
      {
        op: 'attention',
        shapes: [
          [1, 4, 2, 4],
          [1, 4, 2, 4],
          [1, 4, 2, 4],
        ],
        attributes: { scale: 1, causal: false },
      },
      [REPLICATED, shard(1, [4]), shard(1, [4])],
      [REPLICATED],
    ],
  ]

  it.each(wrong)('%s', (_title, call, placements, outputs) => {
    let error = Number.POSITIVE_INFINITY
    try {
      error = placementError(call, placements, placed(...outputs), 2)
    } catch {
      // Ranks that were called replicated and differ are noticed as well.
    }
    expect(error).toBeGreaterThan(1e-3)
  })
})

describe('block arithmetic at degrees 1, 2 and 4', () => {
  const degrees = [1, 2, 4] as const
  const degree = fc.constantFrom(...degrees)
  const blocksOf = (tpDegree: number) =>
    fc
      .array(fc.integer({ min: 1, max: 3 }), { minLength: 1, maxLength: 4 })
      .map((parts) => parts.map((p) => p * tpDegree))
  const sum = (sizes: readonly number[]) => sizes.reduce((total, size) => total + size, 0)

  it('split undoes concat, for shards along the dimension and along another one', () => {
    const example = degree.chain((tpDegree) =>
      fc.record({
        tpDegree: fc.constant(tpDegree),
        pieces: fc.array(blocksOf(tpDegree), { minLength: 1, maxLength: 4 }),
        outer: fc.integer({ min: 1, max: 2 }),
        inner: fc.integer({ min: 1, max: 3 }),
      }),
    )
    fc.assert(
      fc.property(example, ({ tpDegree, pieces, outer, inner }) => {
        const sizes = pieces.map(sum)
        const concat = { op: 'concat', shapes: sizes.map((size) => [outer, size, inner]), attributes: { dim: 1 } }
        const placements = pieces.map((blocks) => shard(1, blocks))
        const joined = placeOp(concat, placements, tpDegree)
        expect(joined.outputs).toEqual([shard(1, pieces.flat())])
        expect(placementError(concat, placements, joined, tpDegree)).toBe(0)
        const split = { op: 'split', shapes: [[outer, sum(sizes), inner]], attributes: { dim: 1, sizes } }
        const apart = placeOp(split, joined.outputs, tpDegree)
        expect(apart.outputs).toEqual(placements)
        expect(placementError(split, joined.outputs, apart, tpDegree)).toBe(0)
      }),
    )
  })

  it('a split between blocks is legal exactly where the pieces are whole blocks', () => {
    const example = degree.chain((tpDegree) =>
      fc.record({
        tpDegree: fc.constant(tpDegree),
        blocks: blocksOf(tpDegree),
        cut: fc.integer({ min: 0, max: 100 }),
      }),
    )
    fc.assert(
      fc.property(example, ({ tpDegree, blocks, cut: number }) => {
        const size = sum(blocks)
        const cut = number % (size + 1)
        const ends = blocks.map((_, i) => sum(blocks.slice(0, i + 1)))
        const call = { op: 'split', shapes: [[size]], attributes: { dim: 0, sizes: [cut, size - cut] } }
        const legal = cut === 0 || ends.includes(cut)
        const placements = [shard(0, blocks)]
        expect(codeOf(() => placeOp(call, placements, tpDegree))).toBe(legal ? undefined : 'PLACEMENT_SPLIT_BLOCK')
        if (legal) expect(placementError(call, placements, placeOp(call, placements, tpDegree), tpDegree)).toBe(0)
      }),
    )
  })

  it('heads are split off and joined again, whatever the batch, tokens, heads and blocks', () => {
    const example = degree.chain((tpDegree) =>
      fc.record({
        tpDegree: fc.constant(tpDegree),
        batch: fc.integer({ min: 1, max: 2 }),
        tokens: fc.integer({ min: 1, max: 3 }),
        heads: blocksOf(tpDegree),
        headDim: fc.integer({ min: 1, max: 4 }),
      }),
    )
    fc.assert(
      fc.property(example, ({ tpDegree, batch, tokens, heads, headDim }) => {
        const joined = [batch, tokens, sum(heads) * headDim]
        const apart = [batch, tokens, sum(heads), headDim]
        const features = shard(
          2,
          heads.map((block) => block * headDim),
        )
        const unflatten = { op: 'reshape', shapes: [joined], attributes: { shape: apart } }
        const split = placeOp(unflatten, [features], tpDegree)
        expect(split.outputs).toEqual([shard(2, heads)])
        expect(placementError(unflatten, [features], split, tpDegree)).toBe(0)
        const flatten = { op: 'reshape', shapes: [apart], attributes: { shape: joined } }
        const merged = placeOp(flatten, split.outputs, tpDegree)
        expect(merged.outputs).toEqual([features])
        expect(placementError(flatten, split.outputs, merged, tpDegree)).toBe(0)
      }),
    )
  })

  it('any reshape that is accepted moves no element to another rank', () => {
    const factors = fc.array(fc.constantFrom(1, 1, 2, 2, 3, 4), { minLength: 1, maxLength: 5 })
    const example = fc.record({
      tpDegree: degree,
      factors,
      cuts: fc.array(fc.boolean(), { minLength: 5, maxLength: 5 }),
      otherCuts: fc.array(fc.boolean(), { minLength: 5, maxLength: 5 }),
      dim: fc.nat(10),
      blocks: fc.nat(3),
    })
    let accepted = 0
    fc.assert(
      fc.property(example, ({ tpDegree, factors, cuts, otherCuts, dim, blocks }) => {
        const from = grouped(factors, cuts)
        const to = grouped(factors, otherCuts)
        const at = dim % from.length
        const size = from[at] as number
        const sizes = blocks > 0 && size % (2 * tpDegree) === 0 ? [size / 2, size / 2] : [size]
        if (size % tpDegree !== 0) return
        const call = { op: 'reshape', shapes: [from], attributes: { shape: to } }
        const placements = [shard(at, sizes)]
        if (codeOf(() => placeOp(call, placements, tpDegree)) !== undefined) return
        accepted++
        expect(placementError(call, placements, placeOp(call, placements, tpDegree), tpDegree)).toBe(0)
      }),
      { numRuns: 2000 },
    )
    expect(accepted).toBeGreaterThan(500)
  })

  it('a reshape to the same shape changes nothing', () => {
    fc.assert(
      fc.property(
        degree,
        fc.array(fc.constantFrom(1, 2, 3, 4), { minLength: 1, maxLength: 4 }),
        fc.nat(3),
        (tpDegree, shape, n) => {
          const dim = n % shape.length
          const size = shape[dim] as number
          if (size % tpDegree !== 0) return
          const placement = shard(dim, [size])
          expect(
            placeOp({ op: 'reshape', shapes: [shape], attributes: { shape } }, [placement], tpDegree).outputs,
          ).toEqual([placement])
        },
      ),
    )
  })
})

/** Products of runs of factors; a true in `cuts` starts a new run. */
function grouped(factors: readonly number[], cuts: readonly boolean[]): number[] {
  const shape: number[] = []
  for (const [i, factor] of factors.entries()) {
    if (i === 0 || cuts[i]) shape.push(factor)
    else shape.push((shape.pop() as number) * factor)
  }
  return shape
}

describe('shape rules', () => {
  const refused: readonly (readonly [title: string, call: OpCall])[] = [
    ['add of sizes that do not go together', { op: 'add', shapes: [[2, 3], [2]] }],
    ['add of two dtypes', { op: 'add', shapes: [[2], [2]], dtypes: ['float32', 'float64'] }],
    [
      'linear of other features',
      {
        op: 'linear',
        shapes: [
          [2, 3],
          [4, 5],
        ],
      },
    ],
    ['linear with a weight of rank 1', { op: 'linear', shapes: [[2, 3], [3]] }],
    ['linear of a scalar', { op: 'linear', shapes: [[], [3, 3]] }],
    [
      'linear of two dtypes',
      {
        op: 'linear',
        shapes: [
          [2, 3],
          [3, 3],
        ],
        dtypes: ['float32', 'float64'],
      },
    ],
    ['embedding of float ids', { op: 'embedding', shapes: [[2], [3, 4]] }],
    ['reshape to another size', { op: 'reshape', shapes: [[4]], attributes: { shape: [5] } }],
    ['reshape to negative sizes', { op: 'reshape', shapes: [[4]], attributes: { shape: [-2, -2] } }],
    ['reshape to fractions', { op: 'reshape', shapes: [[4]], attributes: { shape: [2.5, 1.6] } }],
    [
      'transpose that names a dimension twice',
      { op: 'transpose', shapes: [[2, 3]], attributes: { permutation: [0, 0] } },
    ],
    ['transpose of some dimensions', { op: 'transpose', shapes: [[2, 3]], attributes: { permutation: [0] } }],
    ['split that misses a part', { op: 'split', shapes: [[4]], attributes: { dim: 0, sizes: [1, 2] } }],
    ['split into negative sizes', { op: 'split', shapes: [[4]], attributes: { dim: 0, sizes: [5, -1] } }],
    ['split into fractions', { op: 'split', shapes: [[3]], attributes: { dim: 0, sizes: [1.5, 1.5] } }],
    ['split of a dimension that is not there', { op: 'split', shapes: [[4]], attributes: { dim: 1, sizes: [4] } }],
    [
      'concat of other sizes',
      {
        op: 'concat',
        shapes: [
          [2, 3],
          [3, 3],
        ],
        attributes: { dim: 1 },
      },
    ],
    ['concat of nothing', { op: 'concat', shapes: [], attributes: { dim: 0 } }],
    ['concat of two ranks', { op: 'concat', shapes: [[2], [2, 1]], attributes: { dim: 0 } }],
    ['concat along a dimension that is not there', { op: 'concat', shapes: [[2], [2]], attributes: { dim: 1 } }],
    ['layer_norm with a weight of another size', { op: 'layer_norm', shapes: [[2, 3], [2]], attributes: { eps: 0 } }],
    ['rms_norm of a scalar', { op: 'rms_norm', shapes: [[]], attributes: { eps: 0 } }],
    [
      'group_norm of unequal groups',
      { op: 'group_norm', shapes: [[1, 4, 1, 1], [4], [4]], attributes: { groups: 3, eps: 0 } },
    ],
    ['group_norm without pixels', { op: 'group_norm', shapes: [[1, 4], [4], [4]], attributes: { groups: 2, eps: 0 } }],
    ['attention with another head size', attentionOf([1, 2, 2, 4], [1, 2, 2, 3], [1, 2, 2, 4])],
    ['attention with another number of values', attentionOf([1, 2, 2, 4], [1, 2, 2, 4], [1, 3, 2, 4])],
    ['attention with heads that do not group', attentionOf([1, 2, 3, 4], [1, 2, 2, 4], [1, 2, 2, 4])],
    ['attention with another batch', attentionOf([2, 2, 2, 4], [1, 2, 2, 4], [1, 2, 2, 4])],
    ['attention with a bias per head', attentionOf([1, 2, 2, 4], [1, 2, 2, 4], [1, 2, 2, 4], [1, 2, 2, 2])],
    ['rope with full-size tables', ropeOf([1, 2, 2, 4], [2, 4])],
    ['rope of an odd head', ropeOf([1, 2, 2, 3], [2, 1])],
    ['rope with tables of other tokens', ropeOf([1, 2, 2, 4], [3, 2])],
    ['conv2d of other channels', convOf([1, 2, 4, 4], [3, 3, 1, 1], [3])],
    ['conv2d with another bias', convOf([1, 2, 4, 4], [3, 2, 1, 1], [2])],
    ['conv2d with a kernel that does not fit', convOf([1, 2, 2, 4], [3, 2, 3, 3], [3])],
    ['upsample_nearest2d of a vector', { op: 'upsample_nearest2d', shapes: [[4]], attributes: { scale: 2 } }],
    ['cast of integers', { op: 'cast', shapes: [[4]], dtypes: ['int32'], attributes: { dtype: 'float32' } }],
    ['cast to integers', { op: 'cast', shapes: [[4]], attributes: { dtype: 'int32' } }],
    ['cast to what there is not', { op: 'cast', shapes: [[4]], attributes: { dtype: 'float8' } }],
    ...mixed(
      { op: 'layer_norm', shapes: [[2, 3], [3], [3]], attributes: { eps: 0 } },
      ['bfloat16', 'float32', 'bfloat16'],
      ['float32', 'bfloat16', 'bfloat16'],
      ['bfloat16', 'bfloat16', 'float32'],
    ),
    ...mixed({ op: 'rms_norm', shapes: [[2, 3], [3]], attributes: { eps: 0 } }, ['bfloat16', 'float32']),
    ...mixed(
      { op: 'group_norm', shapes: [[1, 4, 1, 1], [4], [4]], attributes: { groups: 2, eps: 0 } },
      ['bfloat16', 'float32', 'bfloat16'],
      ['bfloat16', 'bfloat16', 'float32'],
    ),
    ...mixed(
      attentionOf([1, 2, 2, 4], [1, 2, 2, 4], [1, 2, 2, 4], [1, 1, 2, 2]),
      ['bfloat16', 'float32', 'float32', 'bfloat16'],
      ['bfloat16', 'bfloat16', 'float32', 'bfloat16'],
      ['bfloat16', 'bfloat16', 'bfloat16', 'float16'],
      ['float32', 'float32', 'float32', 'bfloat16'],
    ),
    ...mixed(
      ropeOf([1, 2, 2, 4], [2, 2]),
      ['float32', 'bfloat16', 'bfloat16'],
      ['bfloat16', 'float32', 'bfloat16'],
      ['bfloat16', 'float16', 'float16'],
      ['float64', 'float32', 'float32'],
    ),
    ...mixed(
      convOf([1, 2, 4, 4], [3, 2, 1, 1], [3]),
      ['bfloat16', 'float32', 'float32'],
      ['bfloat16', 'bfloat16', 'float32'],
    ),
  ]

  it.each(refused)('refuse %s', (_title, call) => {
    const error = refusalOf(() => outputTypes(call))
    expect(error.code).toBe('OP_SHAPE')
    for (const shape of call.shapes) expect(error.message).toContain(`[${shape.join(', ')}]`)
    expect(error.rule).toBeTruthy()
  })

  it.each([
    ['rope by tables in float32', ropeOf([1, 2, 2, 4], [2, 2]), ['float32', 'float32']],
    [
      'attention with a bias in float32',
      attentionOf([1, 2, 2, 4], [1, 2, 2, 4], [1, 2, 2, 4], [1, 1, 2, 2]),
      ['float32'],
    ],
  ] as const)('take %s where the rest is 16 bits', (_title, call, wide) => {
    for (const dtype of ['bfloat16', 'float16'] as const) {
      const dtypes = [...call.shapes.map(() => dtype).slice(wide.length), ...wide]
      expect(outputTypes({ ...call, dtypes })).toEqual([{ dtype, shape: call.shapes[0] }])
    }
  })

  it('an unknown operation is named together with the known ones', () => {
    const error = refusalOf(() => opDefinition('gelu'))
    expect(error.code).toBe('OP_UNKNOWN')
    expect(error.message).toContain("'gelu'")
    expect(error.message).toContain('linear')
  })
})

/** The call on operands of each of these dtypes. */
function mixed(call: OpCall, ...dtypes: readonly (readonly DType[])[]): readonly (readonly [string, OpCall])[] {
  return dtypes.map((types) => [`${call.op} of ${types.join(' and ')}`, { ...call, dtypes: types }])
}

function attentionOf(...shapes: number[][]): OpCall {
  return { op: 'attention', shapes, attributes: { scale: 1, causal: false } }
}

function ropeOf(x: number[], table: number[]): OpCall {
  return { op: 'rope', shapes: [x, table, table], attributes: { interleaved: true } }
}

function convOf(...shapes: number[][]): OpCall {
  return { op: 'conv2d', shapes, attributes: { stride: 1, padding: [0, 0, 0, 0] } }
}

describe('cost rules', () => {
  const flops = (call: OpCall) => {
    const inputs = call.shapes.map((shape, i) => ({ shape, dtype: call.dtypes?.[i] ?? 'float64' }) as const)
    return opDefinition(call.op).cost(inputs, outputTypes(call), call.attributes ?? {}).flops
  }

  it('counts a multiply-add as 2', () => {
    expect(
      flops({
        op: 'linear',
        shapes: [
          [3, 5, 8],
          [16, 8],
        ],
      }),
    ).toBe(2 * 15 * 16 * 8)
    expect(flops(attentionOf([2, 3, 4, 8], [2, 5, 4, 8], [2, 5, 4, 6]))).toBe(2 * 2 * 4 * 3 * 5 * (8 + 6))
    expect(flops(convOf([2, 3, 4, 4], [5, 3, 3, 3], [5]))).toBe(2 * (2 * 5 * 2 * 2) * (3 * 3 * 3))
    expect(flops({ op: 'add', shapes: [[3, 1], [5]] })).toBe(15)
  })

  it('is finite and not negative for every operation', () => {
    for (const rule of RULES) {
      expect(flops(rule)).toBeGreaterThanOrEqual(0)
      expect(Number.isFinite(flops(rule))).toBe(true)
    }
  })
})

import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { attention, embedding, rope } from '../src/functional.ts'
import { Module } from '../src/module.ts'
import { Embedding } from '../src/nn/embedding.ts'
import { Linear } from '../src/nn/linear.ts'
import { RMSNorm } from '../src/nn/norm.ts'
import { partition } from '../src/partition.ts'
import {
  formatPlacement,
  headsDivide,
  localShape,
  PARTIAL,
  type Placement,
  partOf,
  REPLICATED,
  samePlacement,
  shard,
  shardSlices,
} from '../src/placement.ts'
import { checkDegree, legalDegrees, resolvePlan, type TensorParallelPlan } from '../src/plan.ts'
import { runGraph, runRanks } from '../src/reference/index.ts'
import { colwiseHeads } from '../src/styles.ts'
import { Tensor } from '../src/tensor.ts'
import type { TracedTensor } from '../src/traced-tensor.ts'
import { trace } from '../src/tracer.ts'
import { codeOf, distance, randomTensor, refusalOf } from './support.ts'
import { type OpCall, placementError, placeOp } from './support-op.ts'

interface Sizes {
  readonly heads: number
  readonly kvHeads: number
  readonly headDim: number
}

const TOKENS = 3
const ENTRIES = 7

/** Embedding and attention whose queries share keys and values, as a text encoder has them. */
class Encoder extends Module {
  readonly embed: Embedding
  readonly q: Linear
  readonly k: Linear
  readonly v: Linear
  readonly norm: RMSNorm
  readonly o: Linear
  readonly #sizes: Sizes

  constructor(sizes: Sizes) {
    super()
    const { heads, kvHeads, headDim } = sizes
    const width = heads * headDim
    this.embed = new Embedding(ENTRIES, width)
    this.q = new Linear(width, width, { bias: false })
    this.k = new Linear(width, kvHeads * headDim, { heads: kvHeads })
    this.v = new Linear(width, kvHeads * headDim, { bias: false, heads: kvHeads })
    this.norm = new RMSNorm(headDim, { eps: 1e-6 })
    this.o = new Linear(width, width, { bias: false })
    this.#sizes = sizes
  }

  override forward(ids: TracedTensor, cos: TracedTensor, sin: TracedTensor): TracedTensor {
    const { heads, kvHeads, headDim } = this.#sizes
    const x = this.embed.call(ids)
    const split = (y: TracedTensor, count: number) => y.unflatten(-1, [count, headDim])
    const rotate = (y: TracedTensor) => rope(this.norm.call(y), cos, sin, { interleaved: false })
    const q = rotate(split(this.q.call(x), heads))
    const k = rotate(split(this.k.call(x), kvHeads))
    const v = split(this.v.call(x), kvHeads)
    return x.add(this.o.call(attention(q, k, v).flatten(2, 3)))
  }
}

const PLAN: TensorParallelPlan = {
  embed: 'colwise',
  q: 'colwise',
  k: colwiseHeads(),
  v: colwiseHeads(),
  o: 'rowwise',
}

function graphOf(model: Encoder, { headDim }: Sizes) {
  const table = { dtype: 'float64', shape: [TOKENS, headDim / 2] } as const
  const inputs = { ids: { dtype: 'int32', shape: [2, TOKENS] }, cos: table, sin: table } as const
  return trace('Encoder', model, inputs, ({ ids, cos, sin }) => ({ y: model.call(ids, cos, sin) }), 'float64')
}

/** The largest difference of any rank from the model that is not split. */
function splitError(sizes: Sizes, tpDegree: number, plan: TensorParallelPlan): number {
  const model = new Encoder(sizes)
  const graph = graphOf(model, sizes)
  const weights = Object.fromEntries(
    graph.parameters.map(({ name = '', shape }, i) => [name, randomTensor(shape, 100 + i)] as const),
  )
  const inputs = {
    ids: Tensor.int32([2, TOKENS], [0, 6, 3, 2, 2, 5]),
    cos: randomTensor([TOKENS, sizes.headDim / 2], 1),
    sin: randomTensor([TOKENS, sizes.headDim / 2], 2),
  }
  const expected = runGraph(graph, weights, inputs).y as Tensor
  const ranks = runRanks(partition(graph, resolvePlan(model, plan), tpDegree), weights, inputs)
  expect(ranks).toHaveLength(tpDegree)
  return Math.max(...ranks.map(({ y }) => distance(y as Tensor, expected)))
}

/** Heads that a degree can share, be it more or less than them: all of them. */
const EXAMPLES = [1, 2, 3, 4, 6, 8].flatMap((tpDegree) =>
  [1, 2, 3, 4, 8].flatMap((kvHeads) =>
    [1, 2, 3, 4, 8]
      .map((group) => kvHeads * group)
      .filter((heads) => heads % tpDegree === 0 && headsDivide(kvHeads, tpDegree))
      .flatMap((heads) => [2, 4].map((headDim) => ({ tpDegree, kvHeads, heads, headDim }))),
  ),
)

describe('keys and values that queries share', () => {
  it('give on ranks what they give on one, whatever heads and degree', () => {
    for (const { tpDegree, ...sizes } of EXAMPLES) {
      expect(splitError(sizes, tpDegree, PLAN), JSON.stringify({ tpDegree, ...sizes })).toBeLessThan(1e-12)
    }
    expect(EXAMPLES.filter(({ kvHeads, tpDegree }) => kvHeads < tpDegree).length).toBeGreaterThan(30)
  })

  it('are on as few ranks as they can be', () => {
    const model = new Encoder({ heads: 8, kvHeads: 2, headDim: 4 })
    const placements = resolvePlan(model, PLAN)
    expect(localShape([8, 32], placements.get('k.weight')?.placement as Placement, 4)).toEqual([4, 32])
    expect(localShape([8, 32], placements.get('k.weight')?.placement as Placement, 2)).toEqual([4, 32])
    expect(placements.get('k.bias')).toEqual(placements.get('k.weight'))
  })

  it.each([
    ['PLACEMENT_RESHAPE', { k: 'colwise', v: 'colwise' }],
    ['PLACEMENT_ATTENTION_HEADS', { k: colwiseHeads(1), v: colwiseHeads(1) }],
    ['PLACEMENT_ATTENTION_HEADS', { k: colwiseHeads(1) }],
    ['PLACEMENT_ATTENTION_HEADS', { q: colwiseHeads(2) }],
  ] as const)('are refused with %s when they are dealt out as %j', (code, changes) => {
    const sizes = { heads: 8, kvHeads: 2, headDim: 4 }
    const model = new Encoder(sizes)
    const placements = resolvePlan(model, { ...PLAN, ...changes } as TensorParallelPlan)
    expect(codeOf(() => partition(graphOf(model, sizes), placements, 4))).toBe(code)
  })

  it('can fail: other heads than a rank needs give another result', () => {
    const call: OpCall = {
      op: 'attention',
      shapes: [
        [1, 3, 8, 4],
        [1, 3, 2, 4],
        [1, 3, 2, 4],
      ],
      attributes: { scale: 0.5, causal: false },
    }
    const right = [shard(2, [8]), shard(2, [2], 2), shard(2, [2], 2)]
    const placed = placeOp(call, right, 4)
    expect(placementError(call, right, placed, 4)).toBeLessThan(1e-12)
    const whole = [shard(2, [8]), REPLICATED, REPLICATED]
    expect(placementError(call, whole, placed, 4)).toBeGreaterThan(1e-3)
  })
})

describe('what ranks share', () => {
  const shared = shard(1, [8], 2)

  it.each<[string, string, OpCall, Placement[]]>([
    [
      'is not summed',
      'PLACEMENT_ROWWISE_SHARED',
      {
        op: 'linear',
        shapes: [
          [3, 8],
          [4, 8],
        ],
      },
      [shared, shard(1, [8])],
    ],
    [
      'is not cut along its heads',
      'PLACEMENT_SHARED_HEADS',
      { op: 'split', shapes: [[3, 8]], attributes: { dim: 1, sizes: [8] } },
      [shared],
    ],
    [
      'is not joined along its heads',
      'PLACEMENT_SHARED_HEADS',
      {
        op: 'concat',
        shapes: [
          [3, 8],
          [3, 8],
        ],
        attributes: { dim: 1 },
      },
      [shared, shared],
    ],
    [
      'is not added to what they do not',
      'PLACEMENT_ELEMENTWISE',
      {
        op: 'add',
        shapes: [
          [3, 8],
          [3, 8],
        ],
      },
      [shared, shard(1, [8])],
    ],
  ])('%s', (_title, code, call, placements) => {
    expect(codeOf(() => placeOp(call, placements, 4))).toBe(code)
  })

  it.each<[OpCall, Placement]>([
    [
      {
        op: 'add',
        shapes: [
          [3, 8],
          [3, 8],
        ],
      },
      shared,
    ],
    [
      {
        op: 'concat',
        shapes: [
          [3, 8],
          [2, 8],
        ],
        attributes: { dim: 0 },
      },
      shared,
    ],
    [{ op: 'transpose', shapes: [[3, 8]], attributes: { permutation: [1, 0] } }, shard(0, [8], 2)],
    [{ op: 'reshape', shapes: [[3, 8]], attributes: { shape: [3, 2, 4] } }, shard(1, [2], 2)],
    [
      {
        op: 'linear',
        shapes: [
          [3, 4],
          [8, 4],
        ],
      },
      shared,
    ],
  ])('stays shared through %j', (call, expected) => {
    const placements = call.op === 'linear' ? [REPLICATED, shard(0, [8], 2)] : call.shapes.map(() => shared)
    const placed = placeOp(call, placements, 4)
    expect(placed.outputs).toEqual([expected])
    expect(placementError(call, placements, placed, 4)).toBeLessThan(1e-12)
  })

  it('is another placement than what they do not, and printed so', () => {
    expect(samePlacement(shared, shard(1, [8]))).toBe(false)
    expect(samePlacement(shared, shard(1, [8], 2))).toBe(true)
    expect(formatPlacement(shared)).toBe('shard(1, 2 heads)')
  })
})

describe('shardSlices of heads', () => {
  it('gives neighbouring ranks the same head, and all ranks together every head', () => {
    const heads = fc.record({
      heads: fc.integer({ min: 1, max: 12 }),
      headDim: fc.integer({ min: 1, max: 4 }),
      tpDegree: fc.integer({ min: 1, max: 12 }),
    })
    fc.assert(
      fc.property(heads, ({ heads, headDim, tpDegree }) => {
        const placement = shard(0, [heads * headDim], heads)
        if (!headsDivide(heads, tpDegree)) {
          expect(codeOf(() => shardSlices(placement, 0, tpDegree))).toBe(
            tpDegree === 1 ? undefined : 'HEADS_NOT_DIVISIBLE',
          )
          return
        }
        const count = Math.max(1, heads / tpDegree)
        for (let rank = 0; rank < tpDegree; rank++) {
          const first = Math.floor((rank * heads) / tpDegree)
          const [start, end] = shardSlices(placement, rank, tpDegree)?.ranges[0] ?? [0, heads * headDim]
          expect([start, end]).toEqual([first * headDim, (first + count) * headDim])
          expect(end - start).toBe(localShape([heads * headDim], placement, tpDegree)[0])
          expect(partOf(placement, rank, tpDegree)).toBe(first / count)
        }
      }),
    )
  })
})

describe('degrees', () => {
  const placements = (kvHeads: number) => resolvePlan(new Encoder({ heads: 12, kvHeads, headDim: 4 }), PLAN)

  it('may be more than the heads that are shared', () => {
    expect(legalDegrees(placements(2), 12)).toEqual([1, 2, 4, 6, 12])
    expect(legalDegrees(placements(3), 12)).toEqual([1, 3, 6, 12])
    expect(legalDegrees(placements(12), 12)).toEqual([1, 2, 3, 4, 6, 12])
  })

  it('that cannot share them are refused, naming weight and degrees', () => {
    for (const kvHeads of [1, 2, 3, 4, 6, 12]) {
      const legal = legalDegrees(placements(kvHeads), 12)
      for (const degree of [1, 2, 3, 4, 6, 12]) {
        expect(codeOf(() => checkDegree(placements(kvHeads), 12, degree))).toBe(
          legal.includes(degree) ? undefined : 'HEADS_NOT_DIVISIBLE',
        )
      }
    }
    expect(refusalOf(() => checkDegree(placements(3), 12, 2))).toMatchObject({
      where: 'k.weight',
      actual: { heads: 3, tpDegree: 2, legalDegrees: [1, 3, 6, 12] },
    })
  })
})

describe('a table whose columns are dealt out', () => {
  const call: OpCall = {
    op: 'embedding',
    shapes: [
      [2, 3],
      [8, 12],
    ],
    dtypes: ['int32', 'float64'],
  }
  const placements = [REPLICATED, shard(1, [12])]

  it.each([1, 2, 3, 4, 6, 12])('gives summands of whole rows on %i ranks', (tpDegree) => {
    const placed = placeOp(call, placements, tpDegree)
    expect(placed.outputs).toEqual([PARTIAL])
    expect(placementError(call, placements, placed, tpDegree)).toBe(0)
  })

  it('can fail: columns in another place are another row', () => {
    const placed = placeOp(call, placements, 2)
    expect(placementError(call, [REPLICATED, shard(1, [6, 6])], placed, 2)).toBeGreaterThan(1e-3)
  })

  it('gives its row as it is when it is whole', () => {
    class Lookup extends Module {
      readonly embed = new Embedding(8, 12)
      override forward(ids: TracedTensor): TracedTensor {
        return embedding(ids, this.embed.weight)
      }
    }
    const model = new Lookup()
    const graph = trace('Lookup', model, { ids: { dtype: 'int32', shape: [2] } }, ({ ids }) => ({ y: model.call(ids) }))
    expect(partition(graph, new Map(), 4).phases.flatMap(({ allReduce }) => allReduce ?? [])).toEqual([])
    expect(partition(graph, resolvePlan(model, { embed: 'colwise' }), 4).phases[0]?.allReduce?.inputs).toHaveLength(1)
  })
})

import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { rmsNorm } from '../src/functional.ts'
import type { Graph } from '../src/graph.ts'
import { Module } from '../src/module.ts'
import { Linear } from '../src/nn/linear.ts'
import { type PlacedGraph, partition } from '../src/partition.ts'
import { formatPlacement, localShape } from '../src/placement.ts'
import { type ParameterPlacements, resolvePlan, type TensorParallelPlan } from '../src/plan.ts'
import { runGraph, runRanks } from '../src/reference/index.ts'
import type { TracedTensor } from '../src/traced-tensor.ts'
import { trace } from '../src/tracer.ts'
import { distance, refusalOf, requireEqual } from './support.ts'
import {
  AttentionBlock,
  type Block,
  BlocksModel,
  JointBlock,
  LinearPartsBlock,
  MixedUseBlock,
  MlpBlock,
  ParallelBlock,
  randomInputs,
  randomWeights,
  SplitInputBlock,
  SwigluBlock,
  traceModel,
} from './support-model.ts'

const DEGREES = [1, 2, 4] as const
const SIZES = { batch: 2, textTokens: 2, imageTokens: 3 }

function exchangesOf({ phases }: PlacedGraph): number {
  return phases.filter(({ allReduce }) => allReduce !== undefined).length
}

/** Checks a partition against the graph it was made of, on random weights and inputs. */
function expectEquivalent(graph: Graph, placed: PlacedGraph, seed = 1): void {
  const [weights, inputs] = [randomWeights(graph, seed), randomInputs(graph, seed)]
  const expected = runGraph(graph, weights, inputs)
  const ranks = runRanks(placed, weights, inputs)
  expect(ranks).toHaveLength(placed.tpDegree)
  for (const [name, whole] of Object.entries(expected)) {
    for (const outputs of ranks) {
      const output = outputs[name]
      if (output === undefined) throw new Error(`there is no output ${name}`)
      expect(distance(output, whole)).toBeLessThan(1e-12)
      requireEqual(output, ranks[0]?.[name] as typeof output)
    }
  }
}

const streamOptions = {
  stream: fc.constantFrom('text' as const, 'image' as const),
  bias: fc.boolean(),
  gated: fc.boolean(),
}

const block: fc.Arbitrary<Block> = fc.oneof(
  fc
    .record({
      ...streamOptions,
      kvHeads: fc.constantFrom(4),
      causal: fc.boolean(),
      rope: fc.constantFrom('none' as const, 'half' as const, 'interleaved' as const),
    })
    .map((options) => new AttentionBlock(options)),
  fc.record(streamOptions).map((options) => new MlpBlock(options)),
  fc.record(streamOptions).map((options) => new SwigluBlock(options)),
  fc.record(streamOptions).map((options) => new ParallelBlock(options)),
  fc.record(streamOptions).map((options) => new SplitInputBlock(options)),
  fc.record(streamOptions).map((options) => new LinearPartsBlock(options)),
  fc.record({ ...streamOptions, wholeFirst: fc.boolean() }).map((options) => new MixedUseBlock(options)),
  fc.record({ bias: fc.boolean() }).map((options) => new JointBlock(options)),
)

const sizes = fc.record({
  batch: fc.integer({ min: 1, max: 2 }),
  textTokens: fc.integer({ min: 1, max: 3 }),
  imageTokens: fc.integer({ min: 1, max: 3 }),
})

describe('a random model', () => {
  it('computes the same on 1, 2 and 4 ranks as whole, with as many exchanges as its longest chain of sums', () => {
    fc.assert(
      fc.property(fc.array(block, { minLength: 1, maxLength: 4 }), sizes, fc.nat(1000), (blocks, shape, seed) => {
        const model = new BlocksModel(blocks)
        const graph = traceModel(model, shape)
        const placements = resolvePlan(model, model.plan)
        for (const tpDegree of DEGREES) {
          const placed = partition(graph, placements, tpDegree)
          expect(exchangesOf(placed)).toBe(model.depth)
          expectEquivalent(graph, placed, seed)
        }
      }),
      { numRuns: 60 },
    )
  })

  it('has values whose local shapes follow from their placements', () => {
    fc.assert(
      fc.property(
        fc.array(block, { minLength: 1, maxLength: 4 }),
        sizes,
        fc.constantFrom(...DEGREES),
        (blocks, shape, tpDegree) => {
          const model = new BlocksModel(blocks)
          const placed = partition(traceModel(model, shape), resolvePlan(model, model.plan), tpDegree)
          const values = placed.phases.flatMap(({ nodes, allReduce }) =>
            [...nodes, ...(allReduce === undefined ? [] : [allReduce])].flatMap((node) => [
              ...node.inputs,
              ...node.outputs,
            ]),
          )
          for (const value of [...values, ...placed.parameters, ...placed.inputs]) {
            expect(value.localShape).toEqual(localShape(value.shape, value.placement, tpDegree))
            expect(value.localShape.every(Number.isInteger)).toBe(true)
            if (value.placement.kind !== 'shard') continue
            const { dim, blocks: parts } = value.placement
            expect(parts.reduce((sum, size) => sum + size, 0)).toBe(value.shape[dim])
            expect(parts.every((size) => size % tpDegree === 0)).toBe(true)
          }
          expect(new Set(values.map(({ id }) => id)).size).toBe(new Set(values).size)
        },
      ),
      { numRuns: 30 },
    )
  })
})

it('grouped key heads are split together with the query heads', () => {
  for (const kvHeads of [1, 2, 4]) {
    const block = new AttentionBlock({ stream: 'image', bias: true, gated: false, kvHeads, causal: true, rope: 'half' })
    const model = new BlocksModel([block])
    const graph = traceModel(model, SIZES)
    const placements = resolvePlan(model, model.plan)
    for (const tpDegree of DEGREES.filter((degree) => kvHeads % degree === 0)) {
      expectEquivalent(graph, partition(graph, placements, tpDegree))
    }
    const tooMany = DEGREES.find((degree) => kvHeads % degree !== 0)
    if (tooMany === undefined) continue
    // A single head is not cut by the reshape but keeps its features sharded, which rope refuses.
    const code = kvHeads === 1 ? 'PLACEMENT_ROPE' : 'PLACEMENT_RESHAPE'
    expect(refusalOf(() => partition(graph, placements, tooMany))).toMatchObject({ code, where: 'blocks.0' })
  }
})

/** A model of one input whose forward is given, with Linears a to d of width 8. */
class Linears extends Module {
  readonly a: Linear
  readonly b: Linear
  readonly c: Linear
  readonly d: Linear
  readonly #body: (x: TracedTensor, linears: Linears) => TracedTensor

  constructor(body: (x: TracedTensor, linears: Linears) => TracedTensor, bias = false) {
    super()
    this.a = new Linear(8, 8, { bias })
    this.b = new Linear(8, 8, { bias })
    this.c = new Linear(8, 8, { bias })
    this.d = new Linear(8, 8, { bias })
    this.#body = body
  }

  override forward(x: TracedTensor): TracedTensor {
    return this.#body(x, this)
  }
}

type Body = (x: TracedTensor, linears: Linears) => TracedTensor

function placeBody(body: Body, plan: TensorParallelPlan, { tpDegree = 2, bias = false } = {}) {
  const model = new Linears(body, bias)
  const type = { dtype: 'float64', shape: [2, 3, 8] } as const
  const graph = trace('Linears', model, { x: type }, ({ x }) => ({ y: model.call(x) as TracedTensor }), 'float64')
  const placements: ParameterPlacements = resolvePlan(model, plan)
  return { graph, placed: partition(graph, placements, tpDegree) }
}

/** For every phase its operations, and how many values are summed at its end. */
function outline({ phases }: PlacedGraph): string[] {
  return phases.map(({ nodes, allReduce }) => {
    const sums = allReduce === undefined ? '' : ` | ${allReduce.inputs.length}`
    return `${nodes.map(({ op }) => op).join(' ')}${sums}`
  })
}

const PAIR: TensorParallelPlan = { a: 'colwise', b: 'rowwise' }
const TWO_PAIRS: TensorParallelPlan = { ...PAIR, c: 'colwise', d: 'rowwise' }

describe('exchanges', () => {
  it('two streams share one', () => {
    const model = new BlocksModel([new JointBlock({ bias: false })])
    const placed = partition(traceModel(model, SIZES), resolvePlan(model, model.plan), 2)
    const [exchange, ...others] = placed.phases.flatMap(({ allReduce }) => allReduce ?? [])
    expect(others).toEqual([])
    expect(exchange?.inputs.map(({ shape }) => shape[1]).sort()).toEqual([SIZES.textTokens, SIZES.imageTokens])
  })

  it('are 2 for a double block and 1 for a single block', () => {
    const mlp = (stream: 'text' | 'image') => new SwigluBlock({ stream, bias: false, gated: true })
    const double = () => [new JointBlock({ bias: false }), mlp('text'), mlp('image')]
    const single = () => [new ParallelBlock({ stream: 'image', bias: false, gated: true })]
    const count = (blocks: readonly Block[]) => {
      const model = new BlocksModel(blocks)
      return exchangesOf(partition(traceModel(model, SIZES), resolvePlan(model, model.plan), 2))
    }
    expect(count(double())).toBe(2)
    expect(count(single())).toBe(1)
    expect(count([...double(), ...double(), ...single(), ...single(), ...single()])).toBe(7)
  })

  it('do not depend on the order of the code', () => {
    const orders: readonly Body[] = [
      (x, { a, b, c, d }) => {
        const first = b.call(a.call(x).silu())
        const second = d.call(c.call(x).silu())
        return first.silu().add(second.silu())
      },
      (x, { a, b, c, d }) => {
        const first = b.call(a.call(x).silu()).silu()
        const second = d.call(c.call(x).silu()).silu()
        return first.add(second)
      },
      (x, { a, b, c, d }) => {
        const [inner, other] = [c.call(x), a.call(x)]
        const second = d.call(inner.silu()).silu()
        return b.call(other.silu()).silu().add(second)
      },
    ]
    for (const order of orders) {
      const { graph, placed } = placeBody(order, TWO_PAIRS)
      expect(placed.phases.map(({ nodes }) => nodes.map(({ op }) => op).sort())).toEqual([
        ['linear', 'linear', 'linear', 'linear', 'silu', 'silu'],
        ['add', 'silu', 'silu'],
      ])
      expect(exchangesOf(placed)).toBe(1)
      expectEquivalent(graph, placed)
    }
  })

  it('a sum is taken once, however many operations need it', () => {
    const { graph, placed } = placeBody((x, { a, b }) => {
      const partial = b.call(a.call(x))
      return partial.silu().add(partial.sin()).add(partial.cos())
    }, PAIR)
    expect(outline(placed)).toEqual(['linear linear | 1', 'silu sin add cos add'])
    expectEquivalent(graph, placed)
  })

  it('a sum that was asked for serves later linear operations too', () => {
    const { graph, placed } = placeBody((x, { a, b }) => {
      const partial = b.call(a.call(x))
      return partial.silu().add(partial.mul(2).silu())
    }, PAIR)
    expect(outline(placed)).toEqual(['linear linear | 1', 'silu mul_scalar silu add'])
    expectEquivalent(graph, placed)
  })

  it('a partial that is used both whole and as it is gives the right values in either order', () => {
    const wholeFirst: Body = (x, { a, b, d }) => {
      const h = a.call(x)
      const [p, q] = [b.call(h), d.call(h)]
      const whole = p.silu()
      return p.add(q).mul(3).add(whole)
    }
    const linearFirst: Body = (x, { a, b, d }) => {
      const h = a.call(x)
      const [p, q] = [b.call(h), d.call(h)]
      const sum = p.add(q).mul(3)
      return sum.add(p.silu())
    }
    for (const body of [wholeFirst, linearFirst]) {
      const { graph, placed } = placeBody(body, { ...PAIR, d: 'rowwise' })
      expect(exchangesOf(placed)).toBe(1)
      expectEquivalent(graph, placed)
    }
  })

  it('a partial stays partial over later phases until it is needed', () => {
    const { graph, placed } = placeBody((x, { a, b, c, d }) => {
      const early = b.call(a.call(x))
      const late = d.call(c.call(b.call(a.call(x.silu())).silu()))
      return early.add(late)
    }, TWO_PAIRS)
    expect(outline(placed)).toEqual(['linear linear silu linear linear | 1', 'silu linear linear add | 1'])
    expectEquivalent(graph, placed)
  })

  it('a partial that is an output of the model is summed at the end', () => {
    const { graph, placed } = placeBody((x, { a, b }) => b.call(a.call(x)).mul(2), PAIR)
    expect(outline(placed)).toEqual(['linear linear mul_scalar | 1'])
    expect(placed.outputs.y?.placement.kind).toBe('replicated')
    expectEquivalent(graph, placed)
  })

  it('a model without a plan has none', () => {
    const { graph, placed } = placeBody((x, { a, b }) => b.call(a.call(x)), {}, { tpDegree: 4 })
    expect(outline(placed)).toEqual(['linear linear'])
    expectEquivalent(graph, placed)
  })

  it('degree 1 has the same phases', () => {
    const model = new BlocksModel([
      new JointBlock({ bias: true }),
      new ParallelBlock({ stream: 'text', bias: false, gated: true }),
    ])
    const graph = traceModel(model, SIZES)
    const [one, two] = [1, 2].map((degree) => partition(graph, resolvePlan(model, model.plan), degree))
    expect(outline(one as PlacedGraph)).toEqual(outline(two as PlacedGraph))
  })

  it('an output that is an input needs no phase', () => {
    const { graph, placed } = placeBody((x) => x, {})
    expect(placed.phases).toEqual([])
    expectEquivalent(graph, placed)
  })
})

describe('a bias', () => {
  it('of a rowwise Linear is added once, after the sum', () => {
    const { graph, placed } = placeBody((x, { a, b }) => b.call(a.call(x)), PAIR, { bias: true, tpDegree: 4 })
    expect(outline(placed)).toEqual(['linear add linear | 1', 'add'])
    expectEquivalent(graph, placed)
  })

  it('of a colwise Linear is split with the weight', () => {
    const { placed } = placeBody((x, { a, b }) => b.call(a.call(x)), PAIR, { bias: true })
    const placements = placed.parameters.map(({ name, placement }) => `${name} ${formatPlacement(placement)}`)
    expect(placements).toEqual(['a.weight shard(0)', 'a.bias shard(0)', 'b.weight shard(1)', 'b.bias replicated'])
  })
})

describe('rowwise_split_input', () => {
  it('slices a replicated input', () => {
    const { graph, placed } = placeBody((x, { a }) => a.call(x.silu()), { a: 'rowwise_split_input' })
    expect(outline(placed)).toEqual(['silu shard linear | 1'])
    expectEquivalent(graph, placed)
  })

  it('sums a partial input before it slices it', () => {
    const { graph, placed } = placeBody((x, { a, b, c }) => c.call(b.call(a.call(x))), {
      ...PAIR,
      c: 'rowwise_split_input',
    })
    expect(outline(placed)).toEqual(['linear linear | 1', 'shard linear | 1'])
    expectEquivalent(graph, placed)
  })

  it('takes an input that is sharded already as it is', () => {
    const { graph, placed } = placeBody((x, { a, b }) => b.call(a.call(x)), { a: 'colwise', b: 'rowwise_split_input' })
    expect(outline(placed)).toEqual(['linear linear | 1'])
    expectEquivalent(graph, placed)
  })

  it('does not mistake its slice for the input it is of', () => {
    const { placed } = placeBody((x, { a }) => a.call(x), { a: 'rowwise_split_input' })
    const slice = placed.phases[0]?.nodes[0]?.outputs[0]
    expect(slice).toMatchObject({ kind: 'result', placement: { kind: 'shard', dim: 2 } })
    expect(slice).not.toHaveProperty('name')
  })
})

describe('a plan that cannot work is refused', () => {
  it.each<[title: string, body: Body, plan: TensorParallelPlan, code: string, where: string]>([
    [
      'colwise after colwise',
      (x, { a, b }) => b.call(a.call(x)),
      { a: 'colwise', b: 'colwise' },
      'PLACEMENT_COLWISE_INPUT',
      'b',
    ],
    ['rowwise on a whole input', (x, { a }) => a.call(x), { a: 'rowwise' }, 'PLACEMENT_ROWWISE_INPUT', 'a'],
    ['nothing after colwise', (x, { a, b }) => b.call(a.call(x)), { a: 'colwise' }, 'PLACEMENT_REPLICATED_WEIGHT', 'b'],
    ['a sharded output', (x, { a }) => a.call(x), { a: 'colwise' }, 'PLACEMENT_OUTPUT', 'y'],
    [
      'a norm across features',
      (x, { a }) => rmsNorm(a.call(x), { eps: 0 }),
      { a: 'colwise' },
      'PLACEMENT_NORM',
      '(model)',
    ],
    [
      'a residual around half a pair',
      (x, { a }) => x.add(a.call(x)),
      { a: 'colwise' },
      'PLACEMENT_ELEMENTWISE',
      '(model)',
    ],
  ])('%s', (_title, body, plan, code, where) => {
    for (const tpDegree of [1, 2]) {
      const error = refusalOf(() => placeBody(body, plan, { tpDegree }))
      expect(error).toMatchObject({ code, where })
      expect(error.message).toContain('shard(')
      expect(error.rule).toBeTruthy()
    }
  })

  it('names the weight whose placement does not suit', () => {
    const error = refusalOf(() => placeBody((x, { a, b }) => b.call(a.call(x)), { a: 'colwise', b: 'colwise' }))
    expect(error.message).toContain('b.weight shard(0)')
    expect(error.message).toContain('input 0 shard(2)')
  })
})

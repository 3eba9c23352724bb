import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { constant } from '../src/functional.ts'
import type { Value } from '../src/graph.ts'
import { Module } from '../src/module.ts'
import { Linear } from '../src/nn/linear.ts'
import { opDefinition } from '../src/op.ts'
import { type PlacedGraph, partition } from '../src/partition.ts'
import { resolvePlan, type TensorParallelPlan } from '../src/plan.ts'
import { type Segment, type Step, stepsOf } from '../src/segment.ts'
import type { Tensor } from '../src/tensor.ts'
import type { TracedTensor } from '../src/traced-tensor.ts'
import { trace } from '../src/tracer.ts'
import { float64 } from './support.ts'
import {
  AttentionBlock,
  type Block,
  BlocksModel,
  JointBlock,
  MlpBlock,
  ParallelBlock,
  SplitInputBlock,
  SwigluBlock,
  traceModel,
} from './support-model.ts'

const SIZES = { batch: 2, textTokens: 2, imageTokens: 3 }

function place(blocks: readonly Block[], tpDegree: number): PlacedGraph {
  const model = new BlocksModel(blocks)
  return partition(traceModel(model, SIZES), resolvePlan(model, model.plan), tpDegree)
}

function segmentsOf(graph: PlacedGraph, rank = 0): Segment[] {
  return stepsOf(graph, rank).flatMap((step) => (step.kind === 'segment' ? [step.segment] : []))
}

function idsOf(values: readonly Value[]): number[] {
  return values.map(({ id }) => id)
}

function inputsOf(step: Step): readonly Value[] {
  return step.kind === 'segment' ? step.segment.inputs : step.inputs
}

function outputsOf(step: Step): readonly Value[] {
  return step.kind === 'segment' ? step.segment.outputs : step.outputs
}

const IMAGE = { stream: 'image', bias: true, gated: true } as const

const block: fc.Arbitrary<Block> = fc
  .constantFrom(
    () => new MlpBlock(IMAGE),
    () => new SwigluBlock(IMAGE),
    () => new ParallelBlock({ ...IMAGE, stream: 'text' }),
    () => new SplitInputBlock(IMAGE),
    () => new JointBlock({ bias: true }),
    () => new AttentionBlock({ ...IMAGE, kvHeads: 4, causal: false, rope: 'half' }),
  )
  .map((create) => create())

const example = fc.record({
  blocks: fc.array(block, { minLength: 1, maxLength: 4 }),
  tpDegree: fc.constantFrom(1, 2, 4),
  rank: fc.nat(3),
})

describe('steps of a rank', () => {
  it('have local shapes that the operations compute from local operands and attributes', () => {
    fc.assert(
      fc.property(example, ({ blocks, tpDegree, rank }) => {
        for (const { nodes } of segmentsOf(place(blocks, tpDegree), rank % tpDegree)) {
          for (const { op, inputs, attributes, outputs } of nodes) {
            // A rank's slice is the one operation whose result is smaller than its infer rule says.
            if (op === 'shard') continue
            const types = opDefinition(op).infer(inputs, attributes)
            expect(outputs.map(({ dtype, shape }) => ({ dtype, shape }))).toEqual(
              types.map(({ dtype, shape }) => ({ dtype, shape })),
            )
          }
        }
      }),
    )
  })

  it('take only what is there', () => {
    fc.assert(
      fc.property(example, ({ blocks, tpDegree, rank }) => {
        const graph = place(blocks, tpDegree)
        const there = new Set(idsOf(graph.inputs))
        for (const step of stepsOf(graph, rank % tpDegree)) {
          expect(idsOf(inputsOf(step)).filter((id) => !there.has(id))).toEqual([])
          for (const id of idsOf(outputsOf(step))) there.add(id)
        }
        expect(idsOf(Object.values(graph.outputs)).filter((id) => !there.has(id))).toEqual([])
      }),
    )
  })

  it('hand on only what is used later', () => {
    fc.assert(
      fc.property(example, ({ blocks, tpDegree, rank }) => {
        const graph = place(blocks, tpDegree)
        const used = new Set(idsOf(Object.values(graph.outputs)))
        for (const step of [...stepsOf(graph, rank % tpDegree)].reverse()) {
          expect(idsOf(outputsOf(step)).filter((id) => !used.has(id))).toEqual([])
          for (const id of idsOf(inputsOf(step))) used.add(id)
        }
      }),
    )
  })

  it('declare exactly the operands that the operations of a segment do not compute', () => {
    fc.assert(
      fc.property(example, ({ blocks, tpDegree }) => {
        for (const { nodes, inputs, parameters, constants, outputs } of segmentsOf(place(blocks, tpDegree))) {
          const computed = new Set(nodes.flatMap((node) => node.outputs.map(({ id }) => id)))
          const read = nodes.flatMap((node) => node.inputs.map(({ id }) => id)).filter((id) => !computed.has(id))
          const declared = [...inputs, ...parameters, ...constants].map(({ id }) => id)
          expect(new Set(declared)).toEqual(new Set(read))
          expect(declared).toHaveLength(new Set(declared).size)
          expect(outputs.filter(({ id }) => !computed.has(id))).toEqual([])
          expect(parameters.every(({ kind, name }) => kind === 'parameter' && name !== undefined)).toBe(true)
          expect(constants.every(({ kind, data }) => kind === 'constant' && data !== undefined)).toBe(true)
        }
      }),
    )
  })

  it('run every operation after those whose results it reads', () => {
    fc.assert(
      fc.property(example, ({ blocks, tpDegree }) => {
        for (const { nodes, inputs, parameters, constants } of segmentsOf(place(blocks, tpDegree))) {
          const there = new Set(idsOf([...inputs, ...parameters, ...constants]))
          for (const node of nodes) {
            expect(idsOf(node.inputs).filter((id) => !there.has(id))).toEqual([])
            for (const id of idsOf(node.outputs)) there.add(id)
          }
        }
      }),
    )
  })

  it('are the same for all ranks, but for the slices of a replicated input', () => {
    fc.assert(
      fc.property(example, ({ blocks, tpDegree }) => {
        const graph = place(blocks, tpDegree)
        const [first, ...others] = Array.from({ length: tpDegree }, (_, rank) => stepsOf(graph, rank))
        const outline = (steps: typeof first) =>
          steps?.map((step) =>
            step.kind === 'segment'
              ? step.segment.nodes.map(({ op, outputs }) => [op, ...outputs.map(({ shape }) => shape)])
              : step.inputs.map(({ shape }) => shape),
          )
        for (const steps of others) expect(outline(steps)).toEqual(outline(first))
        const slices = blocks.some((candidate) => candidate instanceof SplitInputBlock)
        const keys = new Set([...others, first].map((steps) => JSON.stringify(steps?.map(keyOf))))
        expect(keys.size).toBe(slices ? tpDegree : 1)
      }),
    )
  })

  it('carry local attributes: the sizes of a split and the shape of a reshape', () => {
    const [{ nodes } = { nodes: [] }] = segmentsOf(place([new ParallelBlock({ ...IMAGE, bias: false })], 2))
    expect(nodes.find(({ op }) => op === 'split')?.attributes).toEqual({ dim: 2, sizes: [8, 8, 8, 12, 12] })
    expect(nodes.find(({ path, op }) => path === 'blocks.0' && op === 'reshape')?.attributes).toEqual({
      shape: [2, 3, 2, 4],
    })
  })

  it('slice a replicated input by ranges of the rank', () => {
    const graph = place([new SplitInputBlock({ ...IMAGE, bias: false })], 4)
    const attributes = [0, 3].map(
      (rank) => segmentsOf(graph, rank)[0]?.nodes.find(({ op }) => op === 'shard')?.attributes,
    )
    expect(attributes).toEqual([
      { dim: 2, starts: [0], ends: [4] },
      { dim: 2, starts: [12], ends: [16] },
    ])
  })
})

function keyOf(step: Step): string {
  return step.kind === 'segment' ? step.segment.key : step.kind
}

/** A model of one Linear whose forward is given. */
class One extends Module {
  readonly proj: Linear
  readonly #body: (x: TracedTensor, proj: Linear) => TracedTensor

  constructor(body: (x: TracedTensor, proj: Linear) => TracedTensor, inner: number) {
    super()
    this.proj = new Linear(8, inner)
    this.#body = body
  }

  override forward(x: TracedTensor): TracedTensor {
    return this.#body(x, this.proj)
  }
}

interface Variant {
  readonly body?: (x: TracedTensor, proj: Linear) => TracedTensor
  readonly inner?: number
  readonly tokens?: number
  readonly dtype?: 'float32' | 'float64'
  readonly tpDegree?: number
  readonly plan?: TensorParallelPlan
}

/** The key of the first segment of a model `proj(x)`, or of a variant of it. */
function keyOfVariant(variant: Variant = {}): string | undefined {
  const {
    body = (x, proj) => proj.call(x),
    inner = 8,
    tokens = 3,
    dtype = 'float64',
    tpDegree = 2,
    plan = {},
  } = variant
  const model = new One(body, inner)
  const graph = trace(
    'One',
    model,
    { x: { dtype, shape: [1, tokens, 8] } },
    ({ x }) => ({ y: model.call(x) as TracedTensor }),
    dtype,
  )
  return segmentsOf(partition(graph, resolvePlan(model, plan), tpDegree))[0]?.key
}

describe('the key of a segment', () => {
  it('is the same for blocks of equal structure', () => {
    const blocks = Array.from({ length: 6 }, () => new ParallelBlock(IMAGE))
    const segments = segmentsOf(place(blocks, 2))
    expect(segments).toHaveLength(7)
    // The first one also computes the gate, the last one the head.
    expect(new Set(segments.map(({ key }) => key)).size).toBe(3)
    expect(new Set(segments.slice(1, -1).map(({ key }) => key)).size).toBe(1)
    const weights = segments.slice(1, -1).map(({ parameters }) => parameters.map(({ name }) => name).join())
    expect(new Set(weights).size).toBe(5)
  })

  it('is the same when the model is built and traced again', () => {
    expect(keyOfVariant()).toBe(keyOfVariant())
  })

  const reference = keyOfVariant({
    body: (x, proj) =>
      proj
        .call(x)
        .mul(2)
        .add(constant(float64([8], [1, 2, 3, 4, 5, 6, 7, 8]))),
  })
  const constants = (last: number): Tensor => float64([8], [1, 2, 3, 4, 5, 6, 7, last])

  it.each<[title: string, variant: Variant]>([
    ['shape', { tokens: 4 }],
    [
      'weight',
      {
        inner: 16,
        body: (x, proj) =>
          proj
            .call(x)
            .slice(2, 0, 8)
            .mul(2)
            .add(constant(constants(8))),
      },
    ],
    [
      'attribute',
      {
        body: (x, proj) =>
          proj
            .call(x)
            .mul(3)
            .add(constant(constants(8))),
      },
    ],
    [
      'constant',
      {
        body: (x, proj) =>
          proj
            .call(x)
            .mul(2)
            .add(constant(constants(9))),
      },
    ],
    [
      'operation',
      {
        body: (x, proj) =>
          proj
            .call(x)
            .mul(2)
            .sub(constant(constants(8))),
      },
    ],
    ['operand', { body: (x, proj) => proj.call(x).mul(2).add(proj.call(x)) }],
    ['output', { body: (x, proj) => proj.call(x).mul(2) }],
  ])('differs with another %s', (_title, variant) => {
    const body: Variant['body'] = (x, proj) =>
      proj
        .call(x)
        .mul(2)
        .add(constant(constants(8)))
    expect(keyOfVariant({ body })).toBe(reference)
    expect(keyOfVariant({ body, ...variant })).not.toBe(reference)
  })

  it('differs with the dtype, the placement of the weight and the degree', () => {
    const keys = [
      keyOfVariant(),
      keyOfVariant({ dtype: 'float32' }),
      keyOfVariant({ plan: { proj: 'rowwise_split_input' } }),
      keyOfVariant({ plan: { proj: 'rowwise_split_input' }, tpDegree: 4 }),
    ]
    expect(new Set(keys).size).toBe(keys.length)
  })

  it('differs with which results are handed on', () => {
    const key = (names: readonly ('a' | 'b')[]) => {
      const model = new One((x) => x, 8)
      const type = { dtype: 'float64', shape: [1, 8] } as const
      const graph = trace('outputs', model, { x: type }, ({ x }) => {
        const outputs = { a: x.silu(), b: x.sin() }
        return Object.fromEntries(names.map((name) => [name, outputs[name]]))
      })
      return segmentsOf(partition(graph, new Map(), 1))[0]?.key
    }
    expect(new Set([key(['a']), key(['b']), key(['a', 'b'])]).size).toBe(3)
  })

  it('differs with which operand is which', () => {
    const a = keyOfVariant({ body: (x, proj) => proj.call(x).sub(x) })
    const b = keyOfVariant({ body: (x, proj) => x.sub(proj.call(x) as TracedTensor) })
    expect(a).not.toBe(b)
  })

  it('tells numbers apart that JSON does not', () => {
    const numbers = [0, -0, Number.NaN, Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY]
    const keys = numbers.map((value) => keyOfVariant({ body: (x) => x.add(value) }))
    expect(new Set(keys).size).toBe(numbers.length)
  })
})

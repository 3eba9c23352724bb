import { normal, OP_CASES, type OpCase, opGraph, rotation, segmentOf, WEIGHT_OPERANDS } from '@rankwise/conformance'
import {
  type Attributes,
  castData,
  embedding,
  linear,
  Module,
  Parameter,
  partition,
  type Segment,
  stepsOf,
  Tensor,
  type TracedTensor,
  trace,
} from '@rankwise/core'
import { referenceOp } from '@rankwise/core/reference'
import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { LOWERING_RULES, lowerSegment } from '../src/lowering/lower-segment.ts'
import type { LoweringContext, LoweringRule, LoweringRules, Operand, Parts } from '../src/lowering/rule.ts'
import type { WeightTensor } from '../src/weight-tensor.ts'
import { type BlockSizes, blockInputs, Flux2SingleBlock } from './flux2-single-block.ts'
import { HAS_LINEAR, requireClose, runSegment, TOLERANCE, weightOf } from './support.ts'

const HALVES = ['bfloat16', 'float16'] as const

interface Stored {
  readonly op: string
  readonly attributes: Attributes
  /** Weights in a 16-bit dtype. */
  readonly operands: readonly Tensor[]
}

/** The case with its weights rounded to `dtype`. */
function storedAs(dtype: (typeof HALVES)[number], { op, inputs, attributes }: OpCase): Stored {
  return {
    op,
    attributes,
    operands: inputs.map((operand, i) => (WEIGHT_OPERANDS[op]?.includes(i) ? operand.cast(dtype) : operand)),
  }
}

/** What an operation gives with its weights stored as `store` says. */
async function run(
  { op, attributes, operands }: Stored,
  store: (weight: Tensor) => WeightTensor,
  options: { readonly rules?: LoweringRules; readonly threads?: number } = {},
): Promise<readonly Tensor[]> {
  const weightIndices = (WEIGHT_OPERANDS[op] ?? []).filter((i) => i < operands.length)
  const types = operands.map(({ shape, dtype }) => ({ shape, dtype: dtype === 'int32' ? dtype : ('float32' as const) }))
  const segment = segmentOf(opGraph(op, types, attributes, weightIndices))
  const inputs = operands.filter((_, i) => !weightIndices.includes(i))
  return runSegment(
    segment,
    inputs,
    weightIndices.map((i) => store(operands[i] as Tensor)),
    options,
  )
}

const asFloat32 = (weight: Tensor) => weightOf(weight.cast('float32'))

function requireSameBits(actual: readonly Tensor[], expected: readonly Tensor[]): void {
  expect(actual.map(({ shape }) => shape)).toEqual(expected.map(({ shape }) => shape))
  for (const [i, tensor] of actual.entries()) {
    const [bits, expectedBits] = [bitsOf(tensor), bitsOf(expected[i] as Tensor)]
    // Arrays as large as these take minutes to be printed as a difference.
    expect(bits.findIndex((word, at) => word !== expectedBits[at])).toBe(-1)
  }
}

/** Kernels of our own add up in another order than those of ORT. */
function requireAsCast(actual: readonly Tensor[], cast: readonly Tensor[], hasOwnKernel: boolean): void {
  if (!hasOwnKernel) requireSameBits(actual, cast)
  else for (const [i, tensor] of actual.entries()) requireClose(tensor, cast[i] as Tensor, TOLERANCE)
}

function bitsOf({ data }: Tensor): Uint32Array {
  return new Uint32Array(data.buffer, data.byteOffset, data.byteLength / 4)
}

/** Cuts rows into up to five pieces, of 1 row and of odd numbers among them. */
function cuts(rows: number): readonly number[] {
  const pieces: number[] = []
  for (const piece of [1, 3, 2, 7]) {
    const left = rows - pieces.reduce((sum, count) => sum + count, 0)
    if (left > piece) pieces.push(piece)
  }
  return [...pieces, rows - pieces.reduce((sum, count) => sum + count, 0)]
}

const inPieces = (weight: Tensor) => weightOf(weight, cuts(weight.shape[0] ?? 1))

const WEIGHTED_CASES = OP_CASES.filter(({ op }) => op in WEIGHT_OPERANDS)

describe.each(HALVES)('weights in %s', (dtype) => {
  it('become float32 exactly', async () => {
    const bits = new Tensor(
      dtype,
      [65_536, 1],
      Uint16Array.from({ length: 65_536 }, (_, i) => i),
    )
    const expected = castData(bits.data, dtype, 'float32')
    const ids = Tensor.int32(
      [65_536],
      Int32Array.from({ length: 65_536 }, (_, i) => i),
    )
    const zeros = Tensor.zeros('float32', [1])
    for (const pieces of [[65_536], [1, 65_535]]) {
      const looked = await run({ op: 'embedding', attributes: {}, operands: [ids, bits] }, (table) =>
        weightOf(table, pieces),
      )
      const added = await run({ op: 'add', attributes: {}, operands: [zeros, bits] }, (weight) =>
        weightOf(weight, pieces),
      )
      for (const [result] of [looked, added]) {
        // Not -0, which becomes 0 when 0 is added. NaNs have no payload that anything depends on.
        const different = [...expected].findIndex((value, i) => !Object.is(value + 0, Number(result?.data[i]) + 0))
        expect(different).toBe(-1)
      }
    }
  })

  it.each(WEIGHTED_CASES)('give the bits of weights cast at load: $title', async (opCase) => {
    const stored = storedAs(dtype, opCase)
    const whole = await run(stored, weightOf)
    const ownKernel = HAS_LINEAR && dtype === 'bfloat16' && opCase.op === 'linear'
    requireAsCast(whole, await run(stored, asFloat32), ownKernel)
    requireSameBits(await run(stored, inPieces), whole)
  })
})

describe('weights in several pieces', () => {
  it('in float32 give the bits of whole ones', async () => {
    for (const opCase of WEIGHTED_CASES) {
      const stored = { ...opCase, operands: opCase.inputs }
      const expected = await run(stored, weightOf)
      requireSameBits(await run(stored, inPieces), expected)
    }
  })

  it('are rows of a table and a projection at once', async () => {
    const table = normal([600, 8], 9).cast('bfloat16')
    const model = new Tied()
    const ids = Tensor.int32([4], [599, 0, 300, 299])
    const segment = segmentOf(trace('tied', model, { ids }, (traced) => ({ y: model.call(traced.ids) })))
    const expected = await runSegment(segment, [ids], [asFloat32(table)])
    for (const pieces of [[600], [300, 300], [1, 599]]) {
      requireSameBits(await runSegment(segment, [ids], [weightOf(table, pieces)]), expected)
    }
  })

  it('are looked up before they are cast', () => {
    const segment = segmentOf(opGraph('embedding', [Tensor.int32([2], [0, 1]), normal([5, 3], 0)], {}, [1]))
    for (const pieces of [[5], [2, 3]]) {
      const { nodes } = lowerSegment(segment, [{ dtype: 'bfloat16', pieces }]).model
      const operators = nodes.map(({ opType }) => opType)
      expect(operators.slice(operators.indexOf('Gather'))).toEqual(['Gather', 'BitCast', 'Cast'])
    }
  })

  it('name the module of a lookup that fails', async () => {
    const table = normal([5, 3], 0).cast('bfloat16')
    for (const id of [5, -1]) {
      const operands = [Tensor.int32([1], [id]), table]
      const running = run({ op: 'embedding', attributes: {}, operands }, (weight) => weightOf(weight, [2, 3]))
      await expect(running).rejects.toMatchObject({ code: 'ORT_RUN', where: 'module' })
    }
  })
})

/** A token embedding whose table also projects to the vocabulary. */
class Tied extends Module {
  readonly weight = new Parameter([600, 8])

  override forward(ids: TracedTensor): TracedTensor {
    return linear(embedding(ids, this.weight), this.weight)
  }
}

const WIDE = { rows: 2000, width: 3072 }
const wide = normal([WIDE.rows, WIDE.width], 5, { deviation: WIDE.width ** -0.5 }).cast('bfloat16')

describe.each([1, 2])('a projection that is cut into tiles, on %i threads', (threads) => {
  it.each([1, 7, 300])('gives the bits of a whole one for %i tokens', async (tokens) => {
    const stored = { op: 'linear', attributes: {}, operands: [normal([tokens, WIDE.width], 6), wide] }
    const expected = await run(stored, weightOf, { threads })
    requireAsCast(expected, await run(stored, asFloat32, { threads }), HAS_LINEAR)
    for (const pieces of [[2000], [400, 400, 400, 800], [1, 1999], [16, 1984], [3, 700, 700, 597]]) {
      requireSameBits(await run(stored, (weight) => weightOf(weight, pieces), { threads }), expected)
    }
  })
})

/** Of a weight of 2000 rows. */
const PIECES = [400, 400, 400, 400, 400]

/** Two pieces of what a projection gives, of which the second is split again. */
function splitSegment(sizes: readonly number[], inner: readonly number[]): Segment {
  const graph = opGraph(
    'linear',
    [
      { dtype: 'float32', shape: [5, 8] },
      { dtype: 'float32', shape: [2000, 8] },
    ],
    {},
    [1],
  )
  const [product] = Object.values(graph.outputs)
  const pieces = sizes.map((size, i) => ({ id: 10 + i, kind: 'result', dtype: 'float32', shape: [5, size] }) as const)
  const innerPieces = inner.map((size, i) => ({ ...(pieces[1] as (typeof pieces)[1]), id: 20 + i, shape: [5, size] }))
  const node = { op: 'split', path: 'module' }
  return segmentOf({
    ...graph,
    nodes: [
      ...graph.nodes,
      { ...node, inputs: [product as never], attributes: { dim: 1, sizes }, outputs: pieces },
      { ...node, inputs: [pieces[1] as never], attributes: { dim: 1, sizes: inner }, outputs: innerPieces },
    ],
    outputs: Object.fromEntries([...pieces, ...innerPieces].map((value) => [String(value.id), value])),
  })
}

/** Fails unless pieces of a projection by a weight in several pieces are what they should be. */
async function checkSplit(sizes: readonly number[], inner: readonly number[], rules?: LoweringRules): Promise<void> {
  const [x, weight] = [normal([5, 8], 7), normal([2000, 8], 8).cast('bfloat16')]
  const outer = referenceOp('split', referenceOp('linear', [x, weight], {}), { dim: 1, sizes })
  const expected = [...outer, ...referenceOp('split', [outer[1] as Tensor], { dim: 1, sizes: inner })]
  const results = await runSegment(splitSegment(sizes, inner), [x], [weightOf(weight, PIECES)], { rules })
  for (const [i, result] of results.entries()) requireClose(result, expected[i] as Tensor, TOLERANCE)
}

describe('a projection in parts', () => {
  it.each([
    { sizes: [1200, 800], inner: [400, 400] },
    { sizes: [400, 1600], inner: [800, 800] },
    { sizes: [100, 1900], inner: [350, 1, 1549] },
    { sizes: [1, 1999], inner: [1998, 1] },
    { sizes: [0, 2000], inner: [0, 400, 1600] },
  ])('is split into $sizes and $inner', async ({ sizes, inner }) => checkSplit(sizes, inner))

  it('is split anywhere', async () => {
    const property = fc.asyncProperty(fc.integer({ min: 0, max: 1990 }), fc.nat(), async (first, anyInner) => {
      const rest = 2000 - first
      await checkSplit([first, rest], [anyInner % rest, rest - (anyInner % rest)])
    })
    await fc.assert(property, { numRuns: 30 })
  })

  it('is not copied where the pieces are whole parts', () => {
    const storages = [{ dtype: 'bfloat16', pieces: PIECES }] as const
    const { nodes } = lowerSegment(splitSegment([400, 1600], [800, 800]), storages).model
    expect(nodes.filter(({ opType }) => opType === 'Slice' || opType === 'Split')).toEqual([])
  })
})

const SIZES: BlockSizes = { heads: 4, headDim: 64, mlp: 768, tokens: 77 }

/** What a FLUX.2 single block gives with its weights stored as `store` says. */
async function runBlock(store: (weight: Tensor) => WeightTensor): Promise<readonly Tensor[]> {
  const block = new Flux2SingleBlock(SIZES)
  const graph = trace('block', block, blockInputs(SIZES), (inputs) => ({ out: block.call(inputs) }))
  const [step] = stepsOf(partition(graph, new Map(), 1), 0)
  if (step?.kind !== 'segment') throw new Error('a block is one segment')
  const tables: Readonly<Record<string, Tensor>> = rotation(SIZES.tokens, SIZES.headDim / 2)
  const inputs = step.segment.inputs.map(({ name = '', shape }, i) => tables[name] ?? normal(shape, i))
  const weights = step.segment.parameters.map(({ shape }, i) => {
    const spread = shape.length === 1 ? { mean: 1, deviation: 0.1 } : { deviation: (shape[1] as number) ** -0.5 }
    return store(normal(shape, 10 + i, spread).cast('bfloat16'))
  })
  return runSegment(step.segment, inputs, weights)
}

describe('a FLUX.2 single block', () => {
  const { heads, headDim, mlp } = SIZES
  const width = heads * headDim

  it('gives the bits of weights cast at load', async () => {
    const expected = await runBlock(weightOf)
    requireAsCast(expected, await runBlock(asFloat32), HAS_LINEAR)
    const packed = [width, width, width, mlp, mlp]
    const rows = packed.reduce((sum, size) => sum + size, 0)
    requireSameBits(
      await runBlock((weight) => weightOf(weight, weight.shape[0] === rows ? packed : undefined)),
      expected,
    )
  })
})

/** Deliberately wrong rules for weights that are not whole float32. */
const MUTANTS: readonly { readonly what: string; readonly rules: LoweringRules }[] = [
  {
    what: 'tiles in another order',
    rules: {
      linear: (context: LoweringContext<never>, x: Operand, weight: Operand) => {
        const [product] = (LOWERING_RULES.linear as LoweringRule)(context, x, weight) as readonly [Parts]
        return [{ ...product, parts: product.parts.toReversed() }]
      },
    },
  },
  {
    what: 'a tile is missing',
    rules: {
      linear: ({ onnx }: LoweringContext<never>, x: Operand, weight: Operand) => {
        const [first] = weight.parts.parts
        const product = onnx.op('com.microsoft.FusedMatMul', [x.name, first?.name as string], { transB: { i: 1 } })
        return [{ dim: x.shape.length - 1, parts: weight.parts.parts.map(({ size }) => ({ name: product, size })) }]
      },
    },
  },
  {
    what: 'pieces of a split one part further',
    rules: {
      split: (context: LoweringContext<never>, x: Operand) => {
        const [first, ...others] = x.parts.parts
        const parts = first === undefined ? [] : [...others, first]
        const rule = LOWERING_RULES.split as LoweringRule
        return rule(context, { dtype: x.dtype, shape: x.shape, name: x.name, parts: { ...x.parts, parts } })
      },
    },
  },
]

describe('a wrong lowering of weights is noticed by its values', () => {
  it.each(MUTANTS)('$what', async ({ rules }) => {
    const splitting = checkSplit([400, 1600], [800, 800], { ...LOWERING_RULES, ...rules })
    await expect(splitting).rejects.toThrow('values are not close')
  })

  it('the other 16-bit dtype', async () => {
    const stored = storedAs('bfloat16', WEIGHTED_CASES.find(({ op }) => op === 'linear') as OpCase)
    const [expected] = await run(stored, asFloat32)
    const [actual] = await run(stored, (weight) =>
      weightOf(new Tensor('float16', weight.shape, weight.data as Uint16Array)),
    )
    expect(() => requireClose(actual as Tensor, expected as Tensor, TOLERANCE)).toThrow('values are not close')
  })
})

import {
  type Attributes,
  Linear,
  Module,
  partition,
  type Segment,
  shard,
  sizeOf,
  stepsOf,
  Tensor,
  trace,
} from '@rankwise/core'
import { referenceOp, shardTensor } from '@rankwise/core/reference'
import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { LOWERING_RULES } from '../src/lowering/lower-segment.ts'
import type { LoweringContext, LoweringRule, LoweringRules, Operand } from '../src/lowering/rule.ts'
import { checkOp, normal, requireClose, runSegment, TOLERANCE, weightOf } from './support.ts'

const size = fc.integer({ min: 0, max: 4 })
const shapes = fc.array(size, { minLength: 1, maxLength: 4 })

function count(shape: readonly number[], seed = 0): Tensor {
  return Tensor.float32(
    shape,
    Float32Array.from({ length: sizeOf(shape) }, (_, i) => i + seed),
  )
}

async function checkExact(op: string, inputs: readonly Tensor[], attributes: Attributes): Promise<void> {
  await checkOp({ op, title: op, inputs, attributes, isExact: true })
}

describe('operations that move elements move each to its place', () => {
  it('transpose', async () => {
    const permuted = shapes.chain((shape) =>
      fc.tuple(fc.constant(shape), fc.shuffledSubarray([...shape.keys()], { minLength: shape.length })),
    )
    await fc.assert(
      fc.asyncProperty(permuted, ([shape, permutation]) => checkExact('transpose', [count(shape)], { permutation })),
    )
  })

  it('split and concat', async () => {
    const sizes = fc.array(size, { minLength: 1, maxLength: 4 })
    await fc.assert(
      fc.asyncProperty(shapes, sizes, fc.nat(3), async (shape, sizes, anyDim) => {
        const dim = anyDim % shape.length
        const pieces = sizes.map((part, i) => count(shape.with(dim, part), 1000 * i))
        await checkExact('concat', pieces, { dim })
        const whole = count(
          shape.with(
            dim,
            sizes.reduce((sum, part) => sum + part, 0),
          ),
        )
        await checkExact('split', [whole], { dim, sizes })
      }),
    )
  })

  it('split when only some pieces are read', async () => {
    const sizes = [2, 0, 3, 1]
    const whole = count([2, 6])
    const expected = referenceOp('split', [whole], { dim: 1, sizes })
    for (let used = 0; used < sizes.length; used++) {
      const graph = trace('pieces', new Empty(), { x: whole }, ({ x }) => {
        const piece = x.split(sizes, 1)[used]
        return piece === undefined ? {} : { piece }
      })
      const [step] = stepsOf(partition(graph, new Map(), 1), 0)
      const [result] = step?.kind === 'segment' ? await runSegment(step.segment, [whole]) : []
      requireClose(result as Tensor, expected[used] as Tensor, 0)
    }
  })
})

class Empty extends Module {
  override forward(): void {}
}

/** Fails unless the slices of all ranks and of a row-wise weight add up to the whole product. */
async function checkShard(blocks: readonly number[], tpDegree: number, rules?: LoweringRules): Promise<void> {
  const [x, weight] = [normal([2, 5, 12], 1), normal([7, 12], 2)]
  const model = new Linear(12, 7, { bias: false })
  const graph = trace('linear', model, { x }, (traced) => ({ y: model.call(traced.x) }))
  const placement = shard(1, blocks)
  const placed = partition(graph, new Map([['weight', { placement, splitInput: true }]]), tpDegree)
  const sum = new Float32Array(2 * 5 * 7)
  for (let rank = 0; rank < tpDegree; rank++) {
    const { segment } = stepsOf(placed, rank)[0] as { segment: Segment }
    const slice = shardTensor(weight, placement, rank, tpDegree).cast('float32')
    const [part] = await runSegment(segment, [x], [weightOf(slice)], { rules })
    for (const [i, value] of part?.data.entries() ?? []) sum[i] = (sum[i] as number) + Number(value)
  }
  const [expected] = referenceOp('linear', [x, weight], {})
  requireClose(Tensor.float32([2, 5, 7], sum), expected as Tensor, TOLERANCE)
}

describe('shard takes the slice of a rank', () => {
  it.each([
    { blocks: [12], tpDegree: 1 },
    { blocks: [12], tpDegree: 2 },
    { blocks: [4, 8], tpDegree: 2 },
    { blocks: [4, 8], tpDegree: 4 },
    { blocks: [3, 6, 3], tpDegree: 3 },
  ])('blocks $blocks over $tpDegree ranks', async ({ blocks, tpDegree }) => checkShard(blocks, tpDegree))

  it('and not the plain halves of a packed input', async () => {
    const packed = LOWERING_RULES.shard as LoweringRule
    const plain: LoweringRule = (context: LoweringContext<never>, x: Operand) => {
      const { dim, starts, ends } = context.attributes as { dim: number; starts: number[]; ends: number[] }
      const size = starts.reduce((sum, start, i) => sum + (ends[i] as number) - start, 0)
      const first = starts[0] === 0 ? 0 : size
      return packed({ ...context, attributes: { dim, starts: [first], ends: [first + size] } as never }, x)
    }
    await expect(checkShard([4, 8], 2, { ...LOWERING_RULES, shard: plain })).rejects.toThrow('values are not close')
  })
})

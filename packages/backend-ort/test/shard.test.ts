import { normal } from '@rankwise/conformance'
import { Linear, partition, type Segment, shard, stepsOf, Tensor, trace } from '@rankwise/core'
import { referenceOp, shardTensor } from '@rankwise/core/reference'
import { describe, expect, it } from 'vitest'
import { LOWERING_RULES } from '../src/lowering/lower-segment.ts'
import type { LoweringContext, LoweringRule, LoweringRules, Operand } from '../src/lowering/rule.ts'
import { requireClose, runSegment, TOLERANCE, weightOf } from './support.ts'

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

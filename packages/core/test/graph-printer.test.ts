import { describe, expect, it } from 'vitest'
import { constant } from '../src/functional.ts'
import { printGraph } from '../src/graph-printer.ts'
import { partition } from '../src/partition.ts'
import { resolvePlan } from '../src/plan.ts'
import { trace } from '../src/tracer.ts'
import { float64 } from './support.ts'
import {
  BlocksModel,
  JointBlock,
  MlpBlock,
  ParallelBlock,
  SplitInputBlock,
  traceModel,
  WIDTH,
} from './support-model.ts'

const SIZES = { batch: 1, textTokens: 2, imageTokens: 3 }
const IMAGE = { stream: 'image', bias: false, gated: false } as const

function print(blocks: ConstructorParameters<typeof BlocksModel>[0], tpDegree: number): string {
  const model = new BlocksModel(blocks)
  return printGraph(partition(traceModel(model, SIZES), resolvePlan(model, model.plan), tpDegree))
}

describe('printGraph', () => {
  it('shows a block with its placements, cut at the all-reduce', () => {
    expect(print([new ParallelBlock(IMAGE)], 2)).toMatchInlineSnapshot(`
      "graph BlocksModel tp=2
        input %text: float64[1, 2, 16] replicated
        input %image: float64[1, 3, 16] replicated
        input %time: float64[1, 16] replicated
      segment 0
        %0: float64[1, 3, 16] replicated = layer_norm(%image) {eps=0.00001}  # blocks.0.norm
        %1: float64[1, 3, 96] shard(2: 16|16|16|24|24) = linear(%0, blocks.0.proj_in.weight)  # blocks.0.proj_in
        %2: float64[1, 3, 16] shard(2), %3: float64[1, 3, 16] shard(2), %4: float64[1, 3, 16] shard(2), %5: float64[1, 3, 24] shard(2), %6: float64[1, 3, 24] shard(2) = split(%1) {dim=2, sizes=[16, 16, 16, 24, 24]}  # blocks.0
        %7: float64[1, 3, 4, 4] shard(2) = reshape(%2) {shape=[1, 3, 4, 4]}  # blocks.0
        %8: float64[1, 3, 4, 4] shard(2) = reshape(%3) {shape=[1, 3, 4, 4]}  # blocks.0
        %9: float64[1, 3, 4, 4] shard(2) = reshape(%4) {shape=[1, 3, 4, 4]}  # blocks.0
        %10: float64[1, 3, 4, 4] shard(2) = attention(%7, %8, %9) {scale=0.5, causal=false}  # blocks.0
        %11: float64[1, 3, 16] shard(2) = reshape(%10) {shape=[1, 3, 16]}  # blocks.0
        %12: float64[1, 3, 24] shard(2) = silu(%5)  # blocks.0
        %13: float64[1, 3, 24] shard(2) = mul(%12, %6)  # blocks.0
        %14: float64[1, 3, 40] shard(2: 16|24) = concat(%11, %13) {dim=2}  # blocks.0
        %15: float64[1, 3, 16] partial(sum) = linear(%14, blocks.0.proj_out.weight)  # blocks.0.proj_out
      %16: float64[1, 3, 16] replicated = all_reduce(%15)
      segment 1
        %17: float64[1, 3, 16] replicated = add(%image, %16)  # blocks.0
        %18: float64[1, 3, 16] replicated = layer_norm(%17, norm_out.weight, norm_out.bias) {eps=0.00001}  # norm_out
        %19: float64[1, 3, 5] replicated = linear(%18, proj_out.weight)  # proj_out
        %20: float64[1, 3, 5] replicated = add(%19, proj_out.bias)  # proj_out
      output text = %text
      output image = %20
      "
    `)
  })

  it('shows the slice of a replicated input, and a bias that waits for the sum', () => {
    expect(print([new SplitInputBlock({ ...IMAGE, bias: true })], 2)).toMatchInlineSnapshot(`
      "graph BlocksModel tp=2
        input %text: float64[1, 2, 16] replicated
        input %image: float64[1, 3, 16] replicated
        input %time: float64[1, 16] replicated
      segment 0
        %0: float64[1, 3, 16] replicated = layer_norm(%image, blocks.0.norm.weight, blocks.0.norm.bias) {eps=0.00001}  # blocks.0.norm
        %1: float64[1, 3, 16] shard(2) = shard(%0) {dim=2, blocks=[16]}  # blocks.0.proj
        %2: float64[1, 3, 16] partial(sum) = linear(%1, blocks.0.proj.weight)  # blocks.0.proj
      %3: float64[1, 3, 16] replicated = all_reduce(%2)
      segment 1
        %4: float64[1, 3, 16] replicated = add(%3, blocks.0.proj.bias)  # blocks.0.proj
        %5: float64[1, 3, 16] replicated = add(%image, %4)  # blocks.0
        %6: float64[1, 3, 16] replicated = layer_norm(%5, norm_out.weight, norm_out.bias) {eps=0.00001}  # norm_out
        %7: float64[1, 3, 5] replicated = linear(%6, proj_out.weight)  # proj_out
        %8: float64[1, 3, 5] replicated = add(%7, proj_out.bias)  # proj_out
      output text = %text
      output image = %8
      "
    `)
  })

  it('shows the sums of two streams as one exchange', () => {
    const lines = print([new JointBlock({ bias: false })], 2).split('\n')
    expect(lines.filter((line) => line.includes('all_reduce'))).toEqual([
      expect.stringMatching(
        /^%\d+: float64\[1, 2, 16\] replicated, %\d+: float64\[1, 3, 16\] replicated = all_reduce\(%\d+, %\d+\)$/,
      ),
    ])
  })

  it('prints equal graphs alike', () => {
    const blocks = () => [new MlpBlock(IMAGE), new ParallelBlock(IMAGE)]
    expect(print(blocks(), 2)).toBe(print(blocks(), 2))
  })

  it('names constants by their shape', () => {
    const model = new BlocksModel([])
    const graph = trace('constants', model, { x: { dtype: 'float64', shape: [2, WIDTH] } }, ({ x }) => ({
      y: x.mul(constant(float64([2, 1], [1, 2]))),
    }))
    expect(printGraph(partition(graph, new Map(), 1))).toContain('mul(%x, const[2, 1])')
  })
})

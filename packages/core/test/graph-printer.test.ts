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
        %0: float64[1, 16] replicated = silu(%time)
        %1: float64[1, 16] replicated = linear(%0, time.weight)  # time
        %2: float64[1, 16] replicated = add(%1, time.bias)  # time
        %3: float64[1, 1, 16] replicated = reshape(%2) {shape=[1, 1, 16]}
        %4: float64[1, 3, 16] replicated = layer_norm(%image) {eps=0.00001}  # blocks.0.norm
        %5: float64[1, 3, 96] shard(2: 16|16|16|24|24) = linear(%4, blocks.0.proj_in.weight)  # blocks.0.proj_in
        %6: float64[1, 3, 16] shard(2), %7: float64[1, 3, 16] shard(2), %8: float64[1, 3, 16] shard(2), %9: float64[1, 3, 24] shard(2), %10: float64[1, 3, 24] shard(2) = split(%5) {dim=2, sizes=[16, 16, 16, 24, 24]}  # blocks.0
        %11: float64[1, 3, 4, 4] shard(2) = reshape(%6) {shape=[1, 3, 4, 4]}  # blocks.0
        %12: float64[1, 3, 4, 4] shard(2) = reshape(%7) {shape=[1, 3, 4, 4]}  # blocks.0
        %13: float64[1, 3, 4, 4] shard(2) = reshape(%8) {shape=[1, 3, 4, 4]}  # blocks.0
        %14: float64[1, 3, 4, 4] shard(2) = attention(%11, %12, %13) {scale=0.5, causal=false}  # blocks.0
        %15: float64[1, 3, 16] shard(2) = reshape(%14) {shape=[1, 3, 16]}  # blocks.0
        %16: float64[1, 3, 24] shard(2) = silu(%9)  # blocks.0
        %17: float64[1, 3, 24] shard(2) = mul(%16, %10)  # blocks.0
        %18: float64[1, 3, 40] shard(2: 16|24) = concat(%15, %17) {dim=2}  # blocks.0
        %19: float64[1, 3, 16] partial(sum) = linear(%18, blocks.0.proj_out.weight)  # blocks.0.proj_out
      %20: float64[1, 3, 16] replicated = all_reduce(%19)
      segment 1
        %21: float64[1, 3, 16] replicated = add(%image, %20)  # blocks.0
        %22: float64[1, 3, 16] replicated = layer_norm(%21, norm_out.weight, norm_out.bias) {eps=0.00001}  # norm_out
        %23: float64[1, 3, 5] replicated = linear(%22, proj_out.weight)  # proj_out
        %24: float64[1, 3, 5] replicated = add(%23, proj_out.bias)  # proj_out
      output text = %text
      output image = %24
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
        %0: float64[1, 16] replicated = silu(%time)
        %1: float64[1, 16] replicated = linear(%0, time.weight)  # time
        %2: float64[1, 16] replicated = add(%1, time.bias)  # time
        %3: float64[1, 1, 16] replicated = reshape(%2) {shape=[1, 1, 16]}
        %4: float64[1, 3, 16] replicated = layer_norm(%image, blocks.0.norm.weight, blocks.0.norm.bias) {eps=0.00001}  # blocks.0.norm
        %5: float64[1, 3, 16] shard(2) = shard(%4) {dim=2, blocks=[16]}  # blocks.0.proj
        %6: float64[1, 3, 16] partial(sum) = linear(%5, blocks.0.proj.weight)  # blocks.0.proj
      %7: float64[1, 3, 16] replicated = all_reduce(%6)
      segment 1
        %8: float64[1, 3, 16] replicated = add(%7, blocks.0.proj.bias)  # blocks.0.proj
        %9: float64[1, 3, 16] replicated = add(%image, %8)  # blocks.0
        %10: float64[1, 3, 16] replicated = layer_norm(%9, norm_out.weight, norm_out.bias) {eps=0.00001}  # norm_out
        %11: float64[1, 3, 5] replicated = linear(%10, proj_out.weight)  # proj_out
        %12: float64[1, 3, 5] replicated = add(%11, proj_out.bias)  # proj_out
      output text = %text
      output image = %12
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

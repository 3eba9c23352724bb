import { normal, rotation, segmentOf } from '@rankwise/conformance'
import { GraphExecutor, partition, type Tensor, trace } from '@rankwise/core'
import { runRanks } from '@rankwise/core/reference'
import { describe, expect, it } from 'vitest'
import { ort } from '../src/index.ts'
import { lowerSegment } from '../src/lowering/lower-segment.ts'
import { wholeStorage } from '../src/weight-storage.ts'
import { type BlockSizes, blockInputs, Flux2SingleBlock } from './flux2-single-block.ts'
import { requireClose, TOLERANCE } from './support.ts'

const SIZES: BlockSizes = { heads: 4, headDim: 32, mlp: 384, tokens: 77 }

function traceBlock(sizes: BlockSizes) {
  const block = new Flux2SingleBlock(sizes)
  const graph = trace('block', block, blockInputs(sizes), (inputs) => ({ out: block.call(inputs) }))
  return { block, graph }
}

describe('a FLUX.2 single block', () => {
  it('computes what float64 does', async () => {
    const { block, graph } = traceBlock(SIZES)
    const placed = partition(graph, new Map(), 1)
    const inputs = Object.fromEntries(graph.inputs.map(({ name = '', shape }, i) => [name, normal(shape, i)]))
    const arguments_ = { ...inputs, ...rotation(SIZES.tokens, SIZES.headDim / 2) }
    const weights = Object.fromEntries(
      [...block.namedParameters()].map(([name, { shape }], i) => {
        const spread = shape.length === 1 ? { mean: 1, deviation: 0.1 } : { deviation: (shape[1] as number) ** -0.5 }
        return [name, normal(shape, 10 + i, spread)]
      }),
    )
    await using backend = await ort({ device: 'cpu' })
    const loaded = new Map(Object.entries(weights).map(([name, weight]) => [name, backend.upload(weight)]))
    const executor = await GraphExecutor.compile(placed, { backend, collectives: undefined, weights: loaded })
    const { out } = await executor.run(arguments_)
    const [expected] = runRanks(placed, weights, arguments_)
    requireClose(out as Tensor, expected?.out as Tensor, TOLERANCE)
    await executor.dispose()
  })

  it('moves nothing around its attention', () => {
    const { graph } = traceBlock({ ...SIZES, heads: 8 })
    const segment = segmentOf(graph)
    const storages = segment.parameters.map(({ shape }) => wholeStorage('float32', shape))
    const operators = lowerSegment(segment, storages).model.nodes.map(({ opType }) => opType)
    const known = operators.filter((operator) => ['Transpose', 'Expand', 'Slice'].includes(operator))
    // Expand makes the scale of the layer norm without weights, at compile time.
    expect(known).toEqual(['Expand'])
    expect(operators.filter((operator) => operator === 'MultiHeadAttention')).toHaveLength(1)
  })
})

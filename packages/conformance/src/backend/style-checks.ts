import assert from 'node:assert/strict'
import {
  concat,
  type DType,
  Linear,
  Module,
  type ParallelStyle,
  type Placement,
  packedColwise,
  packedRowwise,
  partition,
  resolvePlan,
  shard,
  shardSlices,
  type Tensor,
  type TensorParallelPlan,
  type TracedTensor,
  trace,
} from '@rankwise/core'
import { runGraph, shardTensor } from '@rankwise/core/reference'
import type { Check, CheckGroup } from '../check.ts'
import { expectClose } from '../compare/expect-close.ts'
import { expectSame } from '../compare/expect-same.ts'
import { opGraph, segmentOf } from '../ops/op-graph.ts'
import { normal } from '../ops/random.ts'
import { type Bench, onBackend } from './bench.ts'
import type { BackendSubject } from './options.ts'
import { runInProcess } from './run-in-process.ts'

const DEGREES = [2, 4]

/** Every parallel style, at 2 and 4 ranks, in every dtype that the backend declares. */
export function styleGroup(subject: BackendSubject): CheckGroup {
  const checks = subject.supports.dtypes.flatMap((dtype) => [
    ...colwiseChecks(subject, dtype),
    ...DEGREES.flatMap((tpDegree) => stackChecks(subject, dtype, tpDegree)),
  ])
  return { title: 'styles', checks }
}

/** An output feature depends on its own row of the weight alone, so a rank computes what one rank would. */
function colwiseChecks(subject: BackendSubject, dtype: DType): readonly Check[] {
  const { colwise } = subject
  const cases: readonly (readonly [string, readonly number[]])[] = [
    ['colwise', [96]],
    ['packedColwise of equal blocks', [32, 32, 32]],
    ['packedColwise of unequal blocks', [16, 16, 16, 24, 24]],
  ]
  return cases.flatMap(([style, blocks]) =>
    DEGREES.map((tpDegree) => ({
      title: `${style} in ${dtype} at degree ${tpDegree}: ${colwise === 'exact' ? 'the bits' : 'the values'} of one rank`,
      run: () =>
        onBackend(subject, (bench) => checkColwise(bench, { colwise, dtype, placement: shard(0, blocks), tpDegree })),
    })),
  )
}

interface ColwiseCase extends Pick<BackendSubject, 'colwise'> {
  readonly dtype: DType
  readonly placement: Placement
  readonly tpDegree: number
}

async function checkColwise(bench: Bench, { colwise, dtype, placement, tpDegree }: ColwiseCase): Promise<void> {
  const x = normal([2, 7, 32], 1).cast(dtype)
  const weight = normal([96, 32], 2).cast(dtype)
  const product = async (rows: Tensor) => {
    const segment = segmentOf(opGraph('linear', [x, rows], {}, [1]))
    return (await bench.run(segment, [x], [rows]))[0] as Tensor
  }
  const whole = await product(weight)
  for (let rank = 0; rank < tpDegree; rank++) {
    const rows = shardTensor(weight, placement, rank, tpDegree).cast(dtype)
    const part = await product(rows)
    // The rows of a rank are features of the result, along its last dimension.
    const features = { ...shardSlices(placement, rank, tpDegree), dim: 2 }
    const expected = shardTensor(whole, { ...placement, dim: features.dim } as Placement, rank, tpDegree)
    if (colwise === 'exact') expectClose(part.cast('float64'), expected, { absolute: 0 })
    else expectSame([part], [expected], { row: 'linear', dtype })
  }
}

/** Two projections, the second of which completes what the first has split. */
class Stack extends Module {
  readonly up: Linear
  readonly down: Linear
  readonly #join: (hidden: TracedTensor) => TracedTensor

  constructor(width: number, joined: number, join: (hidden: TracedTensor) => TracedTensor) {
    super()
    this.up = new Linear(16, width)
    this.down = new Linear(joined, 16)
    this.#join = join
  }

  override forward(x: TracedTensor): TracedTensor {
    return this.down.call(this.#join(this.up.call(x)))
  }
}

interface StackCase {
  readonly title: string
  readonly model: () => Stack
  readonly up: ParallelStyle | undefined
  readonly down: ParallelStyle
}

const STACKS: readonly StackCase[] = [
  {
    title: 'colwise, then rowwise: the bias is added once',
    model: () => new Stack(24, 24, (hidden) => hidden.silu()),
    up: 'colwise',
    down: 'rowwise',
  },
  {
    title: 'rowwise_split_input slices a whole input',
    model: () => new Stack(24, 24, (hidden) => hidden.silu()),
    up: undefined,
    down: 'rowwise_split_input',
  },
  {
    title: 'packedColwise([1, 1]), then rowwise: gate and up stay aligned',
    model: () =>
      new Stack(48, 24, (hidden) => {
        const [gate, up] = hidden.chunk(2, -1) as [TracedTensor, TracedTensor]
        return gate.silu().mul(up)
      }),
    up: packedColwise([1, 1]),
    down: 'rowwise',
  },
  {
    title: 'packedColwise of unequal blocks, then packedRowwise',
    model: () =>
      new Stack(8 + 20 + 20, 8 + 20, (hidden) => {
        const [first, gate, up] = hidden.split([8, 20, 20], -1) as [TracedTensor, TracedTensor, TracedTensor]
        return concat([first, gate.silu().mul(up)], -1)
      }),
    up: packedColwise([2, 5, 5]),
    down: packedRowwise([2, 5]),
  },
]

function stackChecks(subject: BackendSubject, dtype: DType, tpDegree: number): readonly Check[] {
  return STACKS.map(({ title, model: create, up, down }) => ({
    title: `${title}, in ${dtype} at degree ${tpDegree}`,
    run: async () => {
      const model = create()
      const x = normal([2, 5, 16], 3).cast(dtype)
      const graph = trace('Stack', model, { x }, (traced) => ({ y: model.call(traced.x) }), dtype)
      const plan: TensorParallelPlan = { ...(up === undefined ? {} : { up }), down }
      const weights = weightsOf(model, dtype)
      const ranks = await runInProcess(subject, partition(graph, resolvePlan(model, plan), tpDegree), weights, { x })
      const expected = runGraph(graph, weights, { x })
      for (const { y } of ranks) {
        expectSame([y as Tensor], [expected.y as Tensor], { row: 'model', dtype })
        assert.deepEqual(y?.data, ranks[0]?.y?.data, 'all ranks hold the same bits')
      }
    },
  }))
}

function weightsOf(model: Module, dtype: DType): Record<string, Tensor> {
  return Object.fromEntries(
    [...model.namedParameters()].map(([name, { shape }], i) => {
      const deviation = shape.length === 1 ? 1 : (shape[1] as number) ** -0.5
      return [name, normal(shape, 10 + i, { deviation }).cast(dtype)]
    }),
  )
}

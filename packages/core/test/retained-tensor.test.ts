import { expect, it } from 'vitest'
import type { DeviceTensor, Executable } from '../src/backend.ts'
import { GraphExecutor, type RunResult } from '../src/executor.ts'
import { Module } from '../src/module.ts'
import { Linear } from '../src/nn/linear.ts'
import { partition } from '../src/partition.ts'
import { REPLICATED } from '../src/placement.ts'
import { resolvePlan } from '../src/plan.ts'
import { ReferenceBackend, runGraph, shardTensor } from '../src/reference/index.ts'
import { RetainedTensor } from '../src/retained-tensor.ts'
import type { Segment } from '../src/segment.ts'
import type { Tensor } from '../src/tensor.ts'
import type { TracedTensor } from '../src/traced-tensor.ts'
import { trace } from '../src/tracer.ts'
import { distance } from './support.ts'
import { MemoryGroup } from './support-collectives.ts'
import { randomInputs, randomWeights } from './support-model.ts'

const DEGREE = 2
const X = { dtype: 'float64', shape: [2, 3] } as const
const HIDDEN = { dtype: 'float64', shape: [2, 4] } as const

/** Two halves of a network: what the first leaves behind is split, and the second takes it so. */
class Halves extends Module {
  readonly up = new Linear(3, 4, { bias: false })
  readonly down = new Linear(4, 3, { bias: false })

  override forward({ x }: { readonly x: TracedTensor }) {
    const hidden = this.up.call(x).silu()
    return { hidden, y: this.down.call(hidden) }
  }

  resume({ hidden }: { readonly hidden: TracedTensor }) {
    return { y: this.down.call(hidden.mul(2)) }
  }
}

/** Tells of the results of segments. */
class ToldBackend extends ReferenceBackend {
  onResult: (tensor: DeviceTensor) => void = () => {}

  override async compile(segment: Segment): Promise<Executable> {
    const executable = await super.compile(segment)
    return {
      run: async (inputs, parameters) => {
        const results = await executable.run(inputs, parameters)
        for (const result of results) this.onResult(result)
        return results
      },
      dispose: () => executable.dispose(),
    }
  }
}

interface Rank {
  readonly backend: ToldBackend
  readonly start: GraphExecutor
  readonly resume: GraphExecutor
}

const runAll = (ranks: readonly Rank[], inputs: Record<string, Tensor>): Promise<readonly RunResult[]> =>
  Promise.all(ranks.map(({ start }) => start.runRetaining(inputs)))

async function halves() {
  const model = new Halves()
  const placements = resolvePlan(model, { up: 'colwise', down: 'rowwise' })
  const first = trace('first', model, { x: X }, (inputs) => model.forward(inputs), 'float64')
  const second = trace('second', model, { hidden: HIDDEN }, (inputs) => model.resume(inputs), 'float64')
  const [weights, inputs] = [randomWeights(first, 5), randomInputs(first, 5)]
  const start = partition(first, placements, DEGREE, { retained: ['hidden'] })
  const placement = start.outputs.hidden?.placement ?? REPLICATED
  const resume = partition(second, placements, DEGREE, { inputs: new Map([['hidden', placement]]) })
  const group = new MemoryGroup(DEGREE)
  const ranks = await Promise.all(
    [0, 1].map(async (rank) => {
      const backend = new ToldBackend()
      const held = new Map(
        start.parameters.map(({ name = '', placement }) => {
          const shard = shardTensor(weights[name] as Tensor, placement, rank, DEGREE)
          return [name, backend.upload(shard)] as const
        }),
      )
      const options = { backend, collectives: group.member(rank), weights: held }
      return {
        backend,
        start: await GraphExecutor.compile(start, options),
        resume: await GraphExecutor.compile(resume, options),
      }
    }),
  )
  const whole = runGraph(first, weights, inputs)
  const expected = runGraph(second, weights, { hidden: whole.hidden as Tensor })
  return { ranks, inputs, whole, expected: expected.y as Tensor, group }
}

it('stays on each rank as it is split, for runs after runs, without an exchange of its own', async () => {
  const { ranks, inputs, whole, expected, group } = await halves()
  const results = await runAll(ranks, inputs)
  expect(group.exchanges).toBe(1)
  for (const { outputs, retained } of results) {
    expect(Object.keys(outputs)).toEqual(['y'])
    expect(distance(outputs.y as Tensor, whole.y as Tensor)).toBeLessThan(1e-6)
    expect(retained.hidden?.local.shape).toEqual([2, 2])
    expect(retained.hidden?.shape).toEqual([2, 4])
  }
  for (let run = 0; run < 2; run++) {
    const resumed = await Promise.all(
      ranks.map(({ resume }, i) => resume.run({ hidden: results[i]?.retained.hidden as RetainedTensor })),
    )
    for (const { y } of resumed) expect(distance(y as Tensor, expected)).toBeLessThan(1e-6)
  }
})

it('is freed by whoever asked for it, and by a run that does not ask', async () => {
  const { ranks, inputs } = await halves()
  const [first] = ranks as [Rank, Rank]
  const left: DeviceTensor[] = []
  first.backend.onResult = (tensor) => left.push(tensor)
  const [result] = (await runAll(ranks, inputs)) as [RunResult, RunResult]
  const local = result.retained.hidden?.local as DeviceTensor
  expect(left).toContain(local)
  expect(await notFreed(first.backend, left)).toEqual([local])
  result.retained.hidden?.dispose()
  expect(await notFreed(first.backend, left)).toEqual([])
  await Promise.all(ranks.map(({ start }) => start.run(inputs)))
  expect(left.length).toBeGreaterThan(2)
  expect(await notFreed(first.backend, left)).toEqual([])
})

it('is refused where it is split in another way', async () => {
  const { ranks, inputs, whole } = await halves()
  const [first] = ranks as [Rank, Rank]
  const [{ retained }] = (await runAll(ranks, inputs)) as [RunResult, RunResult]
  const otherwise = new RetainedTensor([2, 4], REPLICATED, retained.hidden?.local as DeviceTensor)
  for (const wrong of [otherwise, whole.hidden as Tensor]) {
    await expect(first.resume.run({ hidden: wrong })).rejects.toMatchObject({
      code: 'INPUT_MISMATCH',
      actual: { given: 'float64[2, 4] replicated', traced: 'float64[2, 4] shard(1)' },
    })
  }
})

async function notFreed(backend: ReferenceBackend, tensors: readonly DeviceTensor[]): Promise<readonly DeviceTensor[]> {
  const alive = await Promise.allSettled(tensors.map((tensor) => backend.download(tensor)))
  return tensors.filter((_, i) => alive[i]?.status === 'fulfilled')
}

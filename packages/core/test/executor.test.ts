import { describe, expect, it } from 'vitest'
import type { DeviceTensor, Executable } from '../src/backend.ts'
import { GraphExecutor } from '../src/executor.ts'
import type { Graph } from '../src/graph.ts'
import { Module } from '../src/module.ts'
import { Linear } from '../src/nn/linear.ts'
import { type PlacedGraph, partition } from '../src/partition.ts'
import { resolvePlan } from '../src/plan.ts'
import { ReferenceBackend, runGraph, shardTensor } from '../src/reference/index.ts'
import { type Segment, stepsOf } from '../src/segment.ts'
import { Tensor } from '../src/tensor.ts'
import type { TracedTensor } from '../src/traced-tensor.ts'
import { trace } from '../src/tracer.ts'
import { distance, requireEqual } from './support.ts'
import { MemoryGroup } from './support-collectives.ts'
import {
  AttentionBlock,
  type Block,
  BlocksModel,
  JointBlock,
  LinearPartsBlock,
  MixedUseBlock,
  ParallelBlock,
  randomInputs,
  randomWeights,
  SplitInputBlock,
  traceModel,
  WIDTH,
} from './support-model.ts'

const SIZES = { batch: 2, textTokens: 2, imageTokens: 3 }
const IMAGE = { stream: 'image', bias: true, gated: true } as const

/** Counts the tensors and executables that are not yet disposed. */
class CountingBackend extends ReferenceBackend {
  readonly live = new Set<DeviceTensor>()
  compiled = 0
  /** Called before every run of a segment. */
  onRun: () => void | Promise<void> = () => {}

  override upload(tensor: Tensor): DeviceTensor {
    return this.#track(super.upload(tensor))
  }

  override async compile(segment: Segment): Promise<Executable> {
    this.compiled++
    const executable = await super.compile(segment)
    return {
      run: async (inputs, parameters) => {
        await this.onRun()
        return (await executable.run(inputs, parameters)).map((tensor) => this.#track(tensor))
      },
      dispose: () => executable.dispose(),
    }
  }

  #track(tensor: DeviceTensor): DeviceTensor {
    const dispose = tensor.dispose.bind(tensor)
    this.live.add(tensor)
    tensor.dispose = () => {
      this.live.delete(tensor)
      dispose()
    }
    return tensor
  }
}

interface Rank {
  readonly backend: CountingBackend
  readonly executor: GraphExecutor
}

interface Example {
  readonly group: MemoryGroup
  readonly ranks: readonly Rank[]
  readonly inputs: Record<string, Tensor>
  readonly expected: Record<string, Tensor>
  readonly segments: readonly Segment[]
}

/** A model on `tpDegree` ranks, compiled. */
function example(blocks: readonly Block[], tpDegree: number): Promise<Example> {
  const model = new BlocksModel(blocks)
  const graph = traceModel(model, SIZES)
  return compileRanks(graph, partition(graph, resolvePlan(model, model.plan), tpDegree))
}

async function compileRanks(graph: Graph, placed: PlacedGraph): Promise<Example> {
  const [weights, inputs] = [randomWeights(graph, 3), randomInputs(graph, 3)]
  const group = new MemoryGroup(placed.tpDegree)
  const ranks = await Promise.all(
    Array.from({ length: placed.tpDegree }, (_, rank) => compileRank(placed, weights, group, rank)),
  )
  const segments = stepsOf(placed, 0).flatMap((step) => (step.kind === 'segment' ? [step.segment] : []))
  return { group, ranks, inputs, expected: runGraph(graph, weights, inputs), segments }
}

async function compileRank(
  placed: PlacedGraph,
  whole: Readonly<Record<string, Tensor>>,
  group: MemoryGroup,
  rank: number,
): Promise<Rank> {
  const { tpDegree } = placed
  const backend = new CountingBackend()
  const weights = new Map(
    placed.parameters.map(({ name = '', placement }) => {
      const shard = shardTensor(whole[name] as Tensor, placement, rank, tpDegree)
      // Weights are not counted among the values of a run.
      return [name, new ReferenceBackend().upload(shard)] as const
    }),
  )
  const collectives = tpDegree === 1 ? undefined : group.member(rank)
  return { backend, executor: await GraphExecutor.compile(placed, { backend, collectives, weights }) }
}

const runAll = ({ ranks, inputs }: Example) => Promise.all(ranks.map(({ executor }) => executor.run(inputs)))

const BLOCKS = (): Block[] => [
  new JointBlock({ bias: true }),
  new AttentionBlock({ ...IMAGE, kvHeads: 4, causal: true, rope: 'interleaved' }),
  new ParallelBlock({ ...IMAGE, bias: false }),
  new SplitInputBlock(IMAGE),
  new LinearPartsBlock(IMAGE),
  new MixedUseBlock({ ...IMAGE, wholeFirst: true }),
  new MixedUseBlock({ ...IMAGE, wholeFirst: false }),
]

describe.each([1, 2, 4])('on %i ranks', (tpDegree) => {
  it('computes what the whole graph computes, alike on every rank, run after run', async () => {
    const all = await example(BLOCKS(), tpDegree)
    for (const run of [await runAll(all), await runAll(all)]) {
      for (const [name, whole] of Object.entries(all.expected)) {
        for (const outputs of run) {
          expect(distance(outputs[name] as Tensor, whole)).toBeLessThan(1e-12)
          requireEqual(outputs[name] as Tensor, run[0]?.[name] as Tensor)
        }
      }
    }
    expect(all.group.exchanges).toBe(tpDegree === 1 ? 0 : 2 * 7)
  })

  it('frees every value', async () => {
    const all = await example(BLOCKS(), tpDegree)
    await runAll(all)
    for (const { backend } of all.ranks) expect(backend.live.size).toBe(0)
  })

  it('leaves its inputs as they are', async () => {
    const all = await example(BLOCKS(), tpDegree)
    const before = Object.values(all.inputs).map((tensor) => tensor.clone())
    await runAll(all)
    for (const [i, tensor] of Object.values(all.inputs).entries()) requireEqual(tensor, before[i] as Tensor)
  })
})

it('sums values of a backend that does not lend its memory', async () => {
  const all = await example(BLOCKS(), 2)
  for (const { backend } of all.ranks) Object.defineProperty(backend, 'borrow', { value: undefined })
  for (const outputs of await runAll(all)) {
    for (const [name, whole] of Object.entries(all.expected)) {
      expect(distance(outputs[name] as Tensor, whole)).toBeLessThan(1e-12)
    }
  }
  for (const { backend } of all.ranks) expect(backend.live.size).toBe(0)
})

it('compiles equal segments once, and frees them', async () => {
  const { ranks, segments } = await example(
    Array.from({ length: 5 }, () => new ParallelBlock(IMAGE)),
    2,
  )
  expect(segments).toHaveLength(6)
  for (const { backend, executor } of ranks) {
    expect(backend.compiled).toBe(3)
    expect(backend.memory().executables).toBe(3)
    await executor.dispose()
    await executor.dispose()
    expect(backend.memory().executables).toBe(0)
  }
})

it('frees values as soon as nothing needs them', async () => {
  const all = await example(
    Array.from({ length: 6 }, () => new ParallelBlock(IMAGE)),
    1,
  )
  const [rank] = all.ranks as [Rank]
  const live: number[] = []
  rank.backend.onRun = () => {
    live.push(rank.backend.live.size)
  }
  await runAll(all)
  // Before the first segment the inputs; later the streams, the gate and one part.
  expect(live).toHaveLength(7)
  expect(live.slice(2).every((count) => count === live[2])).toBe(true)
})

/** A part that is summed after the first phase, and that an operation of the second phase adds as it is. */
class PartForLater extends Module {
  readonly a = new Linear(WIDTH, WIDTH, { bias: false })
  readonly b = new Linear(WIDTH, WIDTH, { bias: false })

  override forward(x: TracedTensor): TracedTensor {
    const pair = (input: TracedTensor) => this.b.call(this.a.call(input))
    const part = pair(x)
    const later = part.add(pair(pair(x.sin()).silu()))
    return later.add(part.silu())
  }
}

it('does not clobber a part that is still needed after its sum', async () => {
  const model = new PartForLater()
  const type = { dtype: 'float64', shape: [2, WIDTH] } as const
  const graph = trace('PartForLater', model, { x: type }, ({ x }) => ({ y: model.call(x) }), 'float64')
  const placed = partition(graph, resolvePlan(model, { a: 'colwise', b: 'rowwise' }), 2)
  const part = placed.phases[0]?.allReduce?.inputs.find(({ id }) =>
    placed.phases[1]?.nodes.some(({ inputs }) => inputs.some((input) => input.id === id)),
  )
  expect(part?.placement.kind).toBe('partial')
  const { ranks, inputs, expected } = await compileRanks(graph, placed)
  for (const { y } of await Promise.all(ranks.map(({ executor }) => executor.run(inputs)))) {
    expect(distance(y as Tensor, expected.y as Tensor)).toBeLessThan(1e-12)
  }
})

describe('inputs', () => {
  it.each<[title: string, change: (inputs: Record<string, Tensor>) => Record<string, Tensor>, where: string]>([
    ['a missing one', ({ image: _, ...rest }) => rest, 'image'],
    ['another shape', (inputs) => ({ ...inputs, text: Tensor.zeros('float64', [2, 3, 16]) }), 'text'],
    ['another dtype', (inputs) => ({ ...inputs, time: (inputs.time as Tensor).cast('float32') }), 'time'],
    ['an unknown one', (inputs) => ({ ...inputs, timestep: Tensor.zeros('float64', [1]) }), 'timestep'],
  ])('%s is refused before anything runs', async (_title, change, where) => {
    const all = await example([new ParallelBlock(IMAGE)], 1)
    const [{ executor, backend }] = all.ranks as [Rank]
    backend.onRun = () => {
      throw new Error('ran')
    }
    await expect(executor.run(change(all.inputs))).rejects.toMatchObject({ code: 'INPUT_MISMATCH', where })
    expect(backend.live.size).toBe(0)
  })
})

describe('a run that stops', () => {
  it('does not start with an aborted signal', async () => {
    const all = await example([new ParallelBlock(IMAGE)], 1)
    const [{ executor, backend }] = all.ranks as [Rank]
    const signal = AbortSignal.abort(new Error('enough'))
    const error = await executor.run(all.inputs, { signal }).catch((reason: unknown) => reason)
    expect(error).toMatchObject({ code: 'ABORTED', cause: { message: 'enough' } })
    expect(backend.live.size).toBe(0)
  })

  it('stops before the next segment', async () => {
    const all = await example([new ParallelBlock(IMAGE), new ParallelBlock(IMAGE)], 1)
    const [{ executor, backend }] = all.ranks as [Rank]
    const controller = new AbortController()
    let runs = 0
    backend.onRun = () => {
      runs++
      controller.abort()
    }
    await expect(executor.run(all.inputs, { signal: controller.signal })).rejects.toMatchObject({ code: 'ABORTED' })
    expect(runs).toBe(1)
    expect(backend.live.size).toBe(0)
    backend.onRun = () => {}
    const [outputs] = await runAll(all)
    expect(distance(outputs?.image as Tensor, all.expected.image as Tensor)).toBeLessThan(1e-12)
  })

  it('hands its signal to the all-reduce', async () => {
    const all = await example([new ParallelBlock(IMAGE)], 2)
    const [first, second] = all.ranks as [Rank, Rank]
    const controller = new AbortController()
    // Rank 1 never arrives; rank 0 waits for it.
    second.backend.onRun = () => new Promise<void>(() => {})
    const waiting = first.executor.run(all.inputs, { signal: controller.signal })
    setTimeout(() => controller.abort(), 10)
    await expect(waiting).rejects.toMatchObject({ code: 'ABORTED' })
    expect(first.backend.live.size).toBe(0)
  })

  it('frees every value when a segment fails', async () => {
    const all = await example(BLOCKS(), 1)
    const [{ executor, backend }] = all.ranks as [Rank]
    let runs = 0
    backend.onRun = () => {
      if (++runs === 4) throw new Error('out of memory')
    }
    await expect(executor.run(all.inputs)).rejects.toThrow('out of memory')
    expect(runs).toBe(4)
    expect(backend.live.size).toBe(0)
  })
})

describe('compile', () => {
  const model = new BlocksModel([new ParallelBlock(IMAGE)])
  const placed = partition(traceModel(model, SIZES), resolvePlan(model, model.plan), 2)

  it('refuses a group of another size than the degree', async () => {
    const options = { backend: new ReferenceBackend(), weights: new Map() }
    const refusal = { code: 'TP_DEGREE_WORLD_SIZE' }
    await expect(GraphExecutor.compile(placed, { ...options, collectives: undefined })).rejects.toMatchObject(refusal)
    const collectives = new MemoryGroup(4).member(0)
    await expect(GraphExecutor.compile(placed, { ...options, collectives })).rejects.toMatchObject(refusal)
  })

  it('frees what it compiled when a later segment fails', async () => {
    class Failing extends ReferenceBackend {
      override async compile(segment: Segment): Promise<Executable> {
        if (this.memory().executables === 1) throw new Error('cannot compile')
        return super.compile(segment)
      }
    }
    const backend = new Failing()
    const collectives = new MemoryGroup(2).member(0)
    const weights = new Map(
      placed.parameters.map((value) => [value.name ?? '', backend.upload(Tensor.float32([], [0]))]),
    )
    await expect(GraphExecutor.compile(placed, { backend, collectives, weights })).rejects.toThrow('cannot compile')
    expect(backend.memory().executables).toBe(0)
  })

  it('names a weight that is not loaded', async () => {
    const backend = new ReferenceBackend()
    const collectives = new MemoryGroup(2).member(0)
    await expect(GraphExecutor.compile(placed, { backend, collectives, weights: new Map() })).rejects.toMatchObject({
      code: 'WEIGHT_NOT_LOADED',
      where: 'time.weight',
    })
    expect(backend.memory().executables).toBe(0)
  })

  it('runs no more once it is disposed', async () => {
    const graph = trace('sum', model, { x: { dtype: 'float32', shape: [2] } }, ({ x }) => ({ y: x.add(1) }))
    const options = { backend: new ReferenceBackend(), collectives: undefined, weights: new Map() }
    const executor = await GraphExecutor.compile(partition(graph, new Map(), 1), options)
    await executor.dispose()
    const x = Tensor.float32([2], [1, 2])
    await expect(executor.run({ x })).rejects.toMatchObject({ code: 'EXECUTOR_DISPOSED' })
  })
})

describe('ReferenceBackend', () => {
  it('computes in float64 and rounds results to the dtype of the graph', async () => {
    const model = new BlocksModel([])
    const graph = trace('sum', model, { x: { dtype: 'float32', shape: [2] } }, ({ x }) => ({ y: x.mul(3).mul(1 / 3) }))
    const backend = new ReferenceBackend()
    const executor = await GraphExecutor.compile(partition(graph, new Map(), 1), {
      backend,
      collectives: undefined,
      weights: new Map(),
    })
    const { y } = await executor.run({ x: Tensor.float32([2], [0.1, 1e30]) })
    expect(y).toEqual(Tensor.float32([2], [0.1, 1e30]))
  })

  it('loads, counts and frees weights', async () => {
    const backend = new ReferenceBackend()
    const stored = new Tensor('bfloat16', [2], Uint16Array.of(0x3f80, 0x4000))
    const source = {
      name: 'w',
      file: '/none',
      dtype: stored.dtype,
      fullShape: [2],
      slices: undefined,
      shape: [2],
      byteLength: 4,
      ranges: () => undefined,
      read: async () => stored,
    }
    const weight = await backend.loadShard(source, { dtype: 'float32' })
    expect(await backend.download(weight)).toEqual(Tensor.float32([2], [1, 2]))
    expect(backend.memory().weightBytes).toBe(8)
    weight.dispose()
    weight.dispose()
    expect(backend.memory().weightBytes).toBe(0)
    const second = await backend.loadShard(source, { dtype: 'float64' })
    expect(backend.memory().weightBytes).toBe(16)
    await backend.dispose()
    expect(backend.memory()).toEqual({ weightBytes: 0, mappedBytes: 0, executables: 0 })
    await expect(backend.download(second)).rejects.toMatchObject({ code: 'TENSOR_DISPOSED' })
    const foreign = { dtype: 'float32', shape: [1], dispose() {} } as const
    await expect(backend.download(foreign)).rejects.toMatchObject({ code: 'TENSOR_FOREIGN' })
  })
})

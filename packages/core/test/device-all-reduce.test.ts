import { describe, expect, it } from 'vitest'
import type { DeviceTensor } from '../src/backend.ts'
import type { Collectives, DeviceOptions } from '../src/collectives.ts'
import type { DeviceBuffer, DeviceMemory } from '../src/device-buffer.ts'
import { GraphExecutor } from '../src/executor.ts'
import { Module } from '../src/module.ts'
import { Linear } from '../src/nn/linear.ts'
import { type PlacedGraph, partition } from '../src/partition.ts'
import { resolvePlan } from '../src/plan.ts'
import { ReferenceBackend, runGraph, shardTensor } from '../src/reference/index.ts'
import type { Tensor } from '../src/tensor.ts'
import type { TracedTensor } from '../src/traced-tensor.ts'
import { trace } from '../src/tracer.ts'
import { distance } from './support.ts'
import { MemoryGroup } from './support-collectives.ts'
import { randomInputs, randomWeights, WIDTH } from './support-model.ts'

/** Two pairs of Linears with an all-reduce after each; the first sum may be needed as a part as well. */
class Pairs extends Module {
  readonly a = new Linear(WIDTH, WIDTH, { bias: false })
  readonly b = new Linear(WIDTH, WIDTH, { bias: false })
  readonly #keepsPart: boolean

  constructor(keepsPart: boolean) {
    super()
    this.#keepsPart = keepsPart
  }

  override forward(x: TracedTensor): TracedTensor {
    const pair = (input: TracedTensor) => this.b.call(this.a.call(input))
    const part = pair(x)
    if (!this.#keepsPart) return pair(part.silu()).sin()
    const later = part.add(pair(pair(x.sin()).silu()))
    return later.add(part.silu())
  }
}

/** Memory that only its addresses are known of, as that of a GPU. */
class FakeGpu {
  readonly #tensors: Tensor[] = []

  address(tensor: Tensor): bigint {
    if (!this.#tensors.includes(tensor)) this.#tensors.push(tensor)
    return BigInt(this.#tensors.indexOf(tensor))
  }

  at({ dataPtr }: DeviceBuffer): Tensor {
    return this.#tensors[Number(dataPtr)] as Tensor
  }
}

/** Has its values on a fake GPU, and counts what leaves it. */
class GpuBackend extends ReferenceBackend {
  readonly gpu = new FakeGpu()
  downloads = 0
  readonly deviceMemory: DeviceMemory = {
    stream: 7n,
    borrow: (tensor) => {
      const lent = ReferenceBackend.prototype.borrow.call(this, tensor)
      return { dtype: lent.dtype, shape: lent.shape, dataPtr: this.gpu.address(lent) }
    },
  }

  constructor() {
    super()
    // It lends no memory of the host.
    Object.defineProperty(this, 'borrow', { value: undefined })
  }

  override async download(tensor: DeviceTensor): Promise<Tensor> {
    this.downloads++
    return super.download(tensor)
  }
}

type OnDevice = NonNullable<Collectives['allReduceOnDevice']>

/** Collectives that reach the GPU of a rank, and what they were given. */
function gpuMember(group: MemoryGroup, rank: number, gpu: FakeGpu, given: DeviceOptions[]): Collectives {
  const allReduceOnDevice: OnDevice = (buffers, options = {}) => {
    given.push(options)
    return group.allReduce(
      rank,
      buffers.map((buffer) => gpu.at(buffer)),
      options.signal,
    )
  }
  return Object.assign(group.member(rank), { allReduceOnDevice })
}

interface Outcome {
  readonly error: number
  readonly exchanges: number
  readonly downloads: number
  readonly given: readonly DeviceOptions[]
}

/** @param change - of the collectives of each rank */
async function run(
  keepsPart: boolean,
  change: (collectives: Collectives) => void = () => {},
  signal?: AbortSignal,
): Promise<Outcome> {
  const model = new Pairs(keepsPart)
  const type = { dtype: 'float64', shape: [2, WIDTH] } as const
  const graph = trace('Pairs', model, { x: type }, ({ x }) => ({ y: model.call(x) }), 'float64')
  const placed: PlacedGraph = partition(graph, resolvePlan(model, { a: 'colwise', b: 'rowwise' }), 2)
  const [whole, inputs] = [randomWeights(graph, 3), randomInputs(graph, 3)]
  const group = new MemoryGroup(2)
  const given: DeviceOptions[] = []
  const backends = [new GpuBackend(), new GpuBackend()]
  const results = await Promise.all(
    backends.map(async (backend, rank) => {
      const weights = new Map(
        placed.parameters.map(({ name = '', placement }) => {
          return [name, backend.upload(shardTensor(whole[name] as Tensor, placement, rank, 2))] as const
        }),
      )
      const collectives = gpuMember(group, rank, backend.gpu, given)
      change(collectives)
      const executor = await GraphExecutor.compile(placed, { backend, collectives, weights })
      return executor.run(inputs, { signal })
    }),
  )
  const expected = runGraph(graph, whole, inputs).y as Tensor
  return {
    error: Math.max(...results.map(({ y }) => distance(y as Tensor, expected))),
    exchanges: group.exchanges,
    downloads: backends.reduce((sum, { downloads }) => sum + downloads, 0),
    given,
  }
}

describe('an all-reduce of values on a GPU', () => {
  it('is there, in the order of the stream, and nothing but the outputs leaves it', async () => {
    const { signal } = new AbortController()
    const { error, exchanges, downloads, given } = await run(false, undefined, signal)
    expect(error).toBeLessThan(1e-12)
    expect(exchanges).toBe(2)
    expect(downloads).toBe(2)
    expect(given).toEqual(Array.from({ length: 4 }, () => ({ stream: 7n, signal })))
  })

  it('is on the host where collectives do not reach the GPU', async () => {
    const { error, downloads, given } = await run(false, (collectives) => {
      Object.assign(collectives, { allReduceOnDevice: undefined })
    })
    expect(error).toBeLessThan(1e-12)
    expect(downloads).toBe(2 + 2 * 2)
    expect(given).toEqual([])
  })

  it('does not clobber a part that is still needed after its sum', async () => {
    const { error, downloads, given } = await run(true)
    expect(error).toBeLessThan(1e-12)
    expect(given.length).toBeGreaterThan(0)
    expect(downloads).toBeGreaterThan(2)
  })

  it('that adds nothing is seen in the values', async () => {
    const broken: OnDevice = async () => {}
    const { error } = await run(false, (collectives) => Object.assign(collectives, { allReduceOnDevice: broken }))
    expect(error).toBeGreaterThan(1e-3)
  })
})

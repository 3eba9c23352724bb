import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import {
  type Collectives,
  chromeTrace,
  gatherProfile,
  type ProfileEvent,
  Profiler,
  profiled,
  profileSummary,
  Tensor,
  writeSafetensors,
} from '../src/index.ts'
import { ReferenceBackend } from '../src/reference/index.ts'
import { Mlp, mlpWeights } from './mlp-model.ts'

/** Up to the sum of partial products: two products of 2 * 8 * 4, a bias, and the activation of 8 values at 6 each. */
const FIRST_FLOPS = 2 * 64 + 8 + 8 * 6

/** Of one run. */
const RUN = ['segment', 'segment', 'run']

let folder: string
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), 'rankwise-profile-'))
  await writeFile(join(folder, 'config.json'), '{"_class_name": "Mlp"}')
  await writeSafetensors(join(folder, 'diffusion_pytorch_model.safetensors'), mlpWeights(), { format: 'pt' })
})
afterEach(() => rm(folder, { recursive: true }))

const loadMlp = () => Mlp.fromPretrained(folder, { backend: new ReferenceBackend() })
const x = Tensor.float32([1, 4], [1, 2, 3, 4])
const categories = ({ events }: Profiler) => events.map(({ category }) => category)
const end = ({ start, duration }: ProfileEvent) => start + duration

describe('a profiler', () => {
  it('records what a model does, and compiling once', async () => {
    await using model = await loadMlp()
    using profiler = new Profiler()
    const before = 1000 * Date.now()
    await model.run(x)
    expect(categories(profiler)).toEqual(['compile', ...RUN])
    const [compile, segment, bias, run] = profiler.events as [ProfileEvent, ProfileEvent, ProfileEvent, ProfileEvent]
    expect(segment).toMatchObject({ name: 'layers.0 … layers.1', graph: 'Mlp.run', flops: FIRST_FLOPS })
    expect(bias).toMatchObject({ name: 'layers.1', flops: 4 })
    expect(run).toMatchObject({ name: 'Mlp.run', graph: 'Mlp.run' })
    // One clock's milliseconds against another's.
    expect(compile.start).toBeGreaterThan(before - 5e3)
    expect(end(run)).toBeLessThan(1000 * Date.now() + 5e3)
    expect(run.start).toBeGreaterThanOrEqual(end(compile))
    expect(segment.start).toBeGreaterThanOrEqual(run.start)
    expect(bias.start).toBeGreaterThanOrEqual(end(segment))
    expect(end(bias)).toBeLessThanOrEqual(end(run))
    await model.run(x)
    expect(categories(profiler)).toEqual(['compile', ...RUN, ...RUN])
  })

  it('records only while it is there, and beside others', async () => {
    await using model = await loadMlp()
    await model.run(x)
    const [outer, inner] = [new Profiler(), new Profiler()]
    inner.stop()
    await model.run(x)
    outer.stop()
    await model.run(x)
    expect(categories(outer)).toEqual(RUN)
    expect(inner.events).toEqual([])
  })

  it('records work that fails', async () => {
    using profiler = new Profiler()
    const failing = profiled({ category: 'stage', name: 'decode' }, () => Promise.reject(new Error('full')))
    await expect(failing).rejects.toThrow('full')
    expect(profiler.events).toMatchObject([{ category: 'stage', name: 'decode' }])
  })
})

const graph = 'Model.forward'
const EVENTS: readonly ProfileEvent[] = [
  { category: 'compile', name: graph, graph, start: 0, duration: 2e6 },
  { category: 'segment', name: 'a', graph, start: 2e6, duration: 3e6, flops: 6e9 },
  { category: 'all_reduce', name: 'all_reduce', graph, start: 5e6, duration: 1e6, bytes: 4096 },
  { category: 'segment', name: 'b', graph, start: 6e6, duration: 1e6, flops: 2e9 },
  { category: 'run', name: graph, graph, start: 2e6, duration: 6e6 },
  { category: 'stage', name: 'step 1', start: 0, duration: 9e6 },
]

it('sums up where the time of every graph went', () => {
  const other = { category: 'run', name: 'Other.encode', graph: 'Other.encode', start: 9e6, duration: 1e6 } as const
  expect(profileSummary([...EVENTS, other])).toEqual([
    {
      graph,
      runs: 1,
      seconds: 6,
      segmentSeconds: 4,
      allReduceSeconds: 1,
      compileSeconds: 2,
      allReduces: 1,
      allReduceBytes: 4096,
      flops: 8e9,
    },
    expect.objectContaining({ graph: 'Other.encode', runs: 1, seconds: 1, allReduces: 0, flops: 0 }),
  ])
})

it('writes a trace with a process per rank', () => {
  const { traceEvents } = chromeTrace([EVENTS, EVENTS])
  const of = (pid: number) => traceEvents.filter((event) => (event as { pid: number }).pid === pid)
  expect(of(0)).toHaveLength(traceEvents.length / 2)
  expect(of(1)).toEqual(
    expect.arrayContaining([
      expect.objectContaining({ ph: 'M', name: 'process_name', args: { name: 'rank 1' } }),
      expect.objectContaining({
        ph: 'X',
        name: 'a',
        cat: 'segment',
        ts: 2e6,
        dur: 3e6,
        args: { graph, flops: 6e9, gflops: 2 },
      }),
      expect.objectContaining({ ph: 'X', name: 'all_reduce', ts: 5e6, dur: 1e6, args: { graph, bytes: 4096 } }),
      expect.objectContaining({ ph: 'b', name: 'step 1', ts: 0 }),
      expect.objectContaining({ ph: 'e', name: 'step 1', ts: 9e6 }),
    ]),
  )
})

it('gathers the events of ranks that have different ones', async () => {
  const ranks = [EVENTS, [], EVENTS.slice(2)]
  const gathered = await Promise.all(
    gatheringGroup(ranks.length).map((member, i) => gatherProfile(ranks[i] ?? [], member)),
  )
  for (const all of gathered) expect(all).toEqual(ranks)
})

/** Ranks in this process, of which each gets what all of them give. */
function gatheringGroup(worldSize: number): Collectives[] {
  const rounds: Tensor[][] = []
  const allGather = async (rank: number, round: number, tensor: Tensor) => {
    rounds[round] ??= []
    const given = rounds[round]
    given[rank] = tensor
    while (given.filter(Boolean).length < worldSize) await new Promise(setImmediate)
    const bytes = Buffer.concat(given.map(({ data }) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength)))
    const data = tensor.dtype === 'int32' ? new Int32Array(new Uint8Array(bytes).buffer) : new Uint8Array(bytes)
    return new Tensor(tensor.dtype, [worldSize * (tensor.shape[0] as number), ...tensor.shape.slice(1)], data)
  }
  return Array.from({ length: worldSize }, (_, rank) => {
    let round = 0
    return {
      rank,
      worldSize,
      allGather: (tensor: Tensor) => allGather(rank, round++, tensor),
    } as unknown as Collectives
  })
}

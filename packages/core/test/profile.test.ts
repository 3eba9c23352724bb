import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import fc from 'fast-check'
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

/** What a viewer draws as a bar. */
interface Bar {
  readonly tid: number
  readonly name: string
  readonly ts: number
  readonly dur: number
}

function barsOf(events: readonly ProfileEvent[]): readonly Bar[] {
  return chromeTrace([events]).traceEvents.filter((event) => (event as { ph: string }).ph === 'X') as readonly Bar[]
}

function rowNames(events: readonly ProfileEvent[]): readonly string[] {
  const { traceEvents } = chromeTrace([events])
  const rows = traceEvents as readonly {
    readonly name: string
    readonly tid: number
    readonly args: { name: string }
  }[]
  return rows.flatMap(({ name, tid, args }) => (name === 'thread_name' ? [`${tid} ${args.name}`] : []))
}

/** A run of a graph, and its segments one after the other; in the order in which they end. */
function runOf(name: string, start: number, ...segments: readonly number[]): readonly ProfileEvent[] {
  let at = start
  const parts = segments.map((duration, i) => {
    const part = { category: i % 2 === 0 ? 'segment' : 'all_reduce', name, graph: name, start: at, duration } as const
    at += duration
    return part
  })
  return [...parts, { category: 'run', name, graph: name, start, duration: at - start }]
}

describe('rows of a trace', () => {
  it('are two for runs that follow each other, even where rounding lets them touch', () => {
    // Nearest doubles at today's times are 0.25 µs apart.
    const now = 1.8e15
    const events = [...runOf('a', now, 10), ...runOf('a', now + 9.75, 5, 5), ...runOf('b', now + 20, 5)]
    expect(new Set(barsOf(events).map(({ tid }) => tid))).toEqual(new Set([1, 2]))
    expect(rowNames(events)).toEqual(['1 runs', '2 segments and collectives'])
  })

  it('are further ones for runs that overlap, with their segments below them', () => {
    const events = [...runOf('b', 50, 20, 60, 10), ...runOf('a', 0, 40, 30, 40), ...runOf('c', 200, 10, 5)]
    const rows = new Map(barsOf(events).map(({ name, tid, ts, dur }) => [`${name} ${ts} ${dur}`, tid]))
    expect(Object.fromEntries(rows)).toEqual({
      ...{ 'a 0 110': 1, 'a 0 40': 2, 'a 40 30': 2, 'a 70 40': 2 },
      ...{ 'b 50 90': 3, 'b 50 20': 4, 'b 70 60': 4, 'b 130 10': 4 },
      ...{ 'c 200 15': 1, 'c 200 10': 2, 'c 210 5': 2 },
    })
    const names = ['1 runs', '2 segments and collectives', '3 runs 2', '4 segments and collectives 2']
    expect(rowNames(events)).toEqual(names)
  })

  it('of a run hold its segments, though those of another have room for them', () => {
    const waiting = { category: 'run', name: 'a', graph: 'a', start: 0, duration: 200 } as const
    const bars = barsOf([waiting, ...runOf('b', 50, 20, 60)])
    expect(bars.map(({ name, tid }) => `${name} ${tid}`)).toEqual(['a 1', 'b 4', 'b 4', 'b 3'])
  })

  it('hold nothing that overlaps, and are as few as that takes', () => {
    const run = fc.record({
      name: fc.constantFrom('a', 'b'),
      start: fc.integer({ min: 0, max: 300 }),
      parts: fc.array(fc.integer({ min: 2, max: 50 }), { minLength: 1, maxLength: 4 }),
    })
    const property = fc.property(fc.array(run, { maxLength: 8 }), (runs) => {
      const bars = barsOf(
        runs.flatMap(({ name, start, parts }) => runOf(name, 10 * start, ...parts.map((part) => 10 * part))),
      )
      for (const [i, first] of bars.entries()) {
        for (const second of bars.slice(i + 1)) {
          if (first.tid !== second.tid) continue
          expect(first.ts + first.dur <= second.ts || second.ts + second.dur <= first.ts).toBe(true)
        }
      }
      const [upper, lower] = [1, 0].map((odd) => bars.filter(({ tid }) => tid % 2 === odd)) as [Bar[], Bar[]]
      expect(lower).toHaveLength(bars.length - runs.length)
      const atOnce = upper.map(({ ts }) => upper.filter((other) => other.ts <= ts && ts < other.ts + other.dur).length)
      expect(new Set(upper.map(({ tid }) => tid)).size).toBe(Math.max(0, ...atOnce))
    })
    fc.assert(property, { numRuns: 300 })
  })

  it('are free of stages, which may overlap as they like', () => {
    const stage = { category: 'stage', name: 'step', start: 0, duration: 10 } as const
    const { traceEvents } = chromeTrace([[stage, { ...stage, start: 5 }]])
    expect(traceEvents.filter((event) => 'id' in event)).toMatchObject([{ tid: 0 }, { tid: 0 }, { tid: 0 }, { tid: 0 }])
  })
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

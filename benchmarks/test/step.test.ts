import { spawnSync } from 'node:child_process'
import { mkdtemp, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { writeSyntheticTransformer } from '@rankwise/models-flux2'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { kleinConfig } from '../klein-config.ts'
import { chartPage } from '../step/chart.ts'
import { ENGINE_NAMES, type Engine, findEngine } from '../step/engine.ts'
import type { StepCase } from '../step/job.ts'
import { type Measurement, measureStep } from '../step/measure.ts'
import { measureCase } from '../step/measure-case.ts'
import { measurePeak } from '../step/peak.ts'
import { formatRatios, rowOf } from '../step/row.ts'
import { stepFlops } from '../step/step-flops.ts'

const main = fileURLToPath(new URL('../step/main.ts', import.meta.url))
const never = new AbortController().signal
const CONFIG = {
  ...kleinConfig({ double: 1, single: 1 }),
  attention_head_dim: 16,
  axes_dims_rope: [4, 4, 4, 4],
  in_channels: 8,
  joint_attention_dim: 24,
  num_attention_heads: 4,
}
const CASE: StepCase = { dtype: 'float32', tokens: { image: 16, text: 8 }, tp: 1, threads: 1 }

const found = await Promise.all(ENGINE_NAMES.map((name) => findEngine(name, 'python3')))

let folder: string
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'rankwise-step-'))
  await writeSyntheticTransformer(folder, CONFIG)
})
afterAll(() => rm(folder, { recursive: true }))

const measurement = (seconds: number[], other: Partial<Measurement> = {}): Measurement => ({
  seconds,
  allReduceSeconds: null,
  peakAnonBytes: 5,
  readBytes: null,
  eventLoopMilliseconds: null,
  ...other,
})
const ORT = { name: 'ort-binding', backend: 'ort', engine: 'binding' } as const
const TORCH = { name: 'torch', backend: 'diffusers', engine: 'torch' } as const
const COUNTS = { flops: 8e9, peak: { float32: 4, bfloat16: 2 } }

describe('rows', () => {
  it('take the median of all steps, and the memory of the worst round', () => {
    const rounds = [
      measurement([4, 1], { allReduceSeconds: 0.5, readBytes: 1, eventLoopMilliseconds: 3 }),
      measurement([2], { allReduceSeconds: 0.1, peakAnonBytes: 9, readBytes: 2, eventLoopMilliseconds: 7 }),
    ]
    expect(rowOf(ORT, { ...CASE, tp: 2 }, rounds, COUNTS)).toEqual({
      engine: 'binding',
      backend: 'ort',
      dtype: 'float32',
      tokens: '16+8',
      tp: 2,
      threads: 1,
      seconds: 2,
      minSeconds: 1,
      maxSeconds: 4,
      gflops: 4,
      peakShare: 0.5,
      collectiveShare: 0.25,
      peakAnonBytes: 9,
      readBytes: 2,
      eventLoopMilliseconds: 7,
    })
  })

  it('are compared with torch, with one rank and with one thread', () => {
    const row = (engine: typeof ORT | typeof TORCH, other: Partial<StepCase>, ...seconds: number[]) =>
      rowOf(engine, { ...CASE, ...other }, [measurement(seconds)], COUNTS)
    const rows = [
      row(ORT, {}, 2, 4, 8),
      row(ORT, { tp: 2 }, 2),
      row(ORT, { threads: 2 }, 1),
      row(TORCH, {}, 6, 6, 6),
      row(TORCH, { dtype: 'bfloat16' }, 10),
    ]
    expect(formatRatios(rows).map((line) => line.replaceAll(/ +/g, ' ').trim())).toEqual([
      '16+8 tokens tp 1 1 thread float32 torch / ort binding 1.50x fastest 3.00x',
      '16+8 tokens tp 2 1 thread float32 ort binding tp 1 / tp 2 2.00x fastest 1.00x',
      '16+8 tokens tp 1 2 threads float32 ort binding 1 / 2 threads 4.00x fastest 2.00x',
    ])
  })

  it('are drawn as bars of their seconds', () => {
    const rows = [1, 2].map((seconds) => rowOf(seconds === 1 ? ORT : TORCH, CASE, [measurement([seconds])], COUNTS))
    const page = chartPage(rows, 'a < b')
    expect(page).toContain('<h1>a &lt; b</h1>')
    const [short, long] = [...page.matchAll(/<rect [^>]*width="([\d.]+)"/g)].map(([, width]) => Number(width))
    expect(long).toBeCloseTo(2 * (short as number), 0)
    expect(page).toMatch(/ort binding.*1\.00 s, 8 GFLOP\/s.*torch.*2\.00 s, 4 GFLOP\/s/s)
  })
})

it('counts the operations of a step', () => {
  const [dim, mlp, image, text] = [64, 192, 16, 8]
  const double = (tokens: number) => 2 * tokens * (4 * dim * dim + 2 * dim * mlp + mlp * dim)
  const single = 2 * (image + text) * (dim * (3 * dim + 2 * mlp) + (dim + mlp) * dim)
  const attention = 4 * (image + text) ** 2 * dim
  const products = double(image) + double(text) + single + 2 * attention
  // Besides: embedders, modulations, norms, activations.
  expect(stepFlops(CONFIG, CASE.tokens)).toBeGreaterThan(products)
  expect(stepFlops(CONFIG, CASE.tokens)).toBeLessThan(1.3 * products)
})

it('measures a peak, where there is a compiler', () => {
  const peak = measurePeak()
  if (peak !== undefined) expect(peak.float32).toBeGreaterThan(1)
})

describe('measured steps', () => {
  const rank = (script: string) => ({ file: process.execPath, args: ['-e', script] })
  const answering = (report: string) => `
    const { writeSync } = require('fs')
    const rank = Number(process.env.RANK)
    writeSync(3, 'warm\\n')
    process.stdin.once('data', () => {
      writeSync(3, JSON.stringify(${report}) + '\\n')
      process.exit()
    })`

  it('are as slow as the slowest rank, and their exchanges as short as for the rank that came last', async () => {
    const report =
      '{ seconds: [1 + rank, 3 - rank], allReduceSeconds: 1 + rank, readBytes: 6, eventLoopMilliseconds: rank }'
    const hold = 'if (process.env.RANK === "1") global.held = Buffer.alloc(2e8, 1)'
    const measured = await measureStep(rank(`${hold}; setTimeout(() => {${answering(report)}}, 200)`), 2, never)
    expect(measured).toMatchObject({ seconds: [2, 3], allReduceSeconds: 0.5, readBytes: 6, eventLoopMilliseconds: 1 })
    expect(measured.peakAnonBytes).toBeGreaterThan(2e8)
  })

  it('that fail on one rank say what that rank printed, and the others end', async () => {
    const script = `if (process.env.RANK === '1') throw new Error('no such weight')
      ${answering('{}')}`
    await expect(measureStep(rank(script), 2, never)).rejects.toThrow(/no such weight/)
  })

  it('end when they are stopped', async () => {
    const stop = new AbortController()
    const running = measureStep(rank('setInterval(() => {}, 1000)'), 2, stop.signal)
    setTimeout(() => stop.abort(new Error('stopped')), 100)
    await expect(running).rejects.toThrow('stopped')
  })

  // Processes that each load a runtime, on machines that may be busy.
  it.each([
    [1, ENGINE_NAMES],
    [2, ['ort-capi', 'ort-binding', 'torch']],
  ] as const)('run on %i ranks of each engine that is here, of %s', { timeout: 120_000 }, async (tp, names) => {
    const here = found.flatMap((one) => ('engine' in one ? [one.engine] : []))
    const engines = here.filter(({ name }) => (names as readonly string[]).includes(name))
    expect(engines.map(({ name }) => name)).toContain('ort-binding')
    const trace = join(folder, 'trace.json')
    const rows = await measureCase(
      { ...CASE, tp },
      {
        engines,
        repeat: 1,
        steps: 2,
        pinThreads: tp === 1,
        folder,
        flops: 1e6,
        peak: undefined,
        trace,
        signal: never,
        onRound: () => {},
      },
    )
    expect(rows.map(({ backend }) => backend)).toEqual(engines.map(({ backend }: Engine) => backend))
    for (const { seconds, collectiveShare, backend } of rows) {
      expect(seconds).toBeGreaterThan(0)
      if (backend === 'diffusers') continue
      if (tp === 1) expect(collectiveShare).toBe(0)
      else expect(collectiveShare).toBeGreaterThan(0)
    }
    const { traceEvents } = JSON.parse(await readFile(trace, 'utf8'))
    expect(new Set(traceEvents.map(({ pid }: { pid: number }) => pid)).size).toBe(tp)
  })
})

it.each([
  ['--engines', 'cuda'],
  ['--tokens', '255+512'],
  ['--tp', '5'],
])('refuses %s %s', (option, value) => {
  const args = ['--import', 'tsx', '--conditions=@rankwise/source', main, option, value]
  const { status, stderr } = spawnSync(process.execPath, args, { encoding: 'utf8' })
  expect(stderr).toContain(option)
  expect(status).toBe(1)
})

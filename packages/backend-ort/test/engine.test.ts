import { execFile } from 'node:child_process'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { Tensor } from '@rankwise/core'
import { describe, expect, it, onTestFinished } from 'vitest'
import { type Addon, loadAddon } from '../src/engine/addon.ts'
import { CapiEngine } from '../src/engine/capi-engine.ts'
import { ENGINE_VARIABLE } from '../src/engine/engine-selection.ts'
import { parseProcessors, placeThreads } from '../src/engine/pinning.ts'
import { checkEngine } from '../src/engine/self-check.ts'
import { HostTensor } from '../src/host-tensor.ts'
import { ort } from '../src/index.ts'
import { OnnxBuilder } from '../src/onnx/onnx-builder.ts'
import { placedBlock, sourceOf } from './workers/placed-block.ts'

function builtAddon(): Addon | undefined {
  try {
    return loadAddon()
  } catch {
    return undefined
  }
}

// Without a C compiler there is no addon, and its tests are reported as skipped.
const addon = builtAddon()
const capi = describe.skipIf(addon === undefined)

/** What a scenario of workers/engine-process.ts prints. */
async function inProcess(...args: readonly string[]): Promise<unknown> {
  const script = fileURLToPath(new URL('workers/engine-process.ts', import.meta.url))
  const flags = ['--expose-gc', '--import', 'tsx', '--conditions=@rankwise/source']
  const cwd = fileURLToPath(new URL('../../..', import.meta.url))
  const { stdout, stderr } = await promisify(execFile)(process.execPath, [...flags, script, ...args], { cwd })
  expect(stderr).toBe('')
  return JSON.parse(stdout)
}

describe('the engine', () => {
  it('is said, with the reason why it is not another', async () => {
    await using backend = await ort({ device: 'cpu', threads: 1 })
    expect(backend.selection).toMatchObject({ engine: backend.engine })
    expect(backend.engine).toBe(addon === undefined ? 'binding' : 'capi')
    expect(backend.selection.rejected).toHaveLength(addon === undefined ? 1 : 0)
  })

  it('is what was asked for', async () => {
    await using binding = await ort({ device: 'cpu', engine: 'binding' })
    expect(binding).toMatchObject({ engine: 'binding', selection: { engine: 'binding', rejected: [] } })
    await expect(ort({ device: 'cpu', engine: 'cuda' as 'capi' })).rejects.toMatchObject({ code: 'BACKEND_ENGINE' })
  })

  it('is that of the environment where none is asked for', async () => {
    const before = process.env[ENGINE_VARIABLE]
    onTestFinished(() => {
      if (before === undefined) delete process.env[ENGINE_VARIABLE]
      else process.env[ENGINE_VARIABLE] = before
    })
    process.env[ENGINE_VARIABLE] = 'binding'
    await using backend = await ort({ device: 'cpu' })
    expect(backend.engine).toBe('binding')
    process.env[ENGINE_VARIABLE] = 'none'
    await expect(ort({ device: 'cpu' })).rejects.toMatchObject({ code: 'BACKEND_ENGINE', actual: { engine: 'none' } })
  })

  it('has no addon where none was compiled', async () => {
    const empty = await mkdtemp(join(tmpdir(), 'rankwise-empty-'))
    onTestFinished(() => rm(empty, { recursive: true }))
    expect(() => loadAddon(empty)).toThrow(
      expect.objectContaining({ code: 'ORT_ENGINE', remedy: expect.stringContaining('native/build.mjs') }),
    )
  })
})

capi('the C API', () => {
  const open = (changes: Partial<Addon> = {}) => CapiEngine.open({ threads: 1 }, { ...(addon as Addon), ...changes })

  it('is that of the library which the npm package ships', async () => {
    const engine = open()
    expect(engine.version).toMatch(/^1\.\d+\.\d+$/)
    await checkEngine(engine)
    await engine.dispose()
    await engine.dispose()
  })

  it.each<{ what: string; changes: Partial<Addon> }>([
    { what: 'computes nothing', changes: { run: async () => {} } },
    { what: 'refuses nothing', changes: { load: async () => {} } },
    {
      what: 'says nothing',
      changes: {
        run: (...args) => (addon as Addon).run(...args).catch(() => Promise.reject(new Error('it failed'))),
      },
    },
  ])('is not used where it $what', async ({ changes }) => {
    const engine = open(changes)
    await expect(checkEngine(engine)).rejects.toMatchObject({ code: 'ORT_ENGINE' })
    await engine.dispose()
  })

  it('is refused where the library does not load', () => {
    const failing = () => {
      throw new Error('no such library')
    }
    expect(() => open({ open: failing })).toThrow(expect.objectContaining({ code: 'ORT_ENGINE' }))
  })

  it('reads and writes nothing but what it was given', () => {
    const native = (addon as Addon).open.bind(addon)
    const graph = (addon as Addon).describe([{ name: 'x', elementType: 1, itemBytes: 4, shape: [4] }], 1)
    expect(() => native('/none.so', 0, null, -1)).toThrow('threads')
    expect(() => (addon as Addon).describe([{ name: 'x', elementType: 1, itemBytes: 4, shape: [-1] }], 1)).toThrow()
    expect(() => (addon as Addon).describe([], 1)).toThrow()
    expect(() => (addon as Addon).run(graph as never, graph, [new Float32Array(4)])).toThrow()
  })
})

capi('memory of results', () => {
  async function block(tokens = 16) {
    const { segment, inputs, weights: values } = placedBlock(tokens)
    const backend = await ort({ device: 'cpu', engine: 'capi', threads: 1 })
    const weights = await Promise.all(values.map((value) => backend.loadShard(sourceOf(value), { dtype: 'float32' })))
    const executable = await backend.compile(segment, weights)
    const run = async () => {
      const [result] = await executable.run(
        inputs.map((input) => backend.upload(input)),
        weights,
      )
      return HostTensor.from(result as HostTensor)
    }
    return { backend, executable, segment, inputs, weights, run }
  }

  it('is used again after it was disposed of, and not before', async () => {
    const { backend, run } = await block()
    await using _ = backend
    const [first, second] = [await run(), await run()]
    const [one, two] = [first.tensor.data.buffer, second.tensor.data.buffer]
    expect(two).not.toBe(one)
    first.dispose()
    first.dispose()
    const [third, fourth] = [await run(), await run()]
    expect(third.tensor.data.buffer).toBe(one)
    expect([one, two]).not.toContain(fourth.tensor.data.buffer)
  })

  it('is not used again where it was downloaded', async () => {
    const { backend, run } = await block()
    await using _ = backend
    const first = await run()
    const { data } = await backend.download(first)
    first.dispose()
    expect((await run()).tensor.data.buffer).not.toBe(data.buffer)
  })

  it('is not used again while a run reads it', async () => {
    const { backend, executable, segment, inputs, weights, run } = await block()
    await using _ = backend
    const x = segment.inputs.findIndex(({ name }) => name === 'x')
    const computed = await run()
    const buffer = computed.tensor.data.buffer
    const given = inputs.map((input, i) => (i === x ? computed : backend.upload(input)))
    const reading = executable.run(given, weights)
    computed.dispose()
    const later = await run()
    expect(later.tensor.data.buffer).not.toBe(buffer)
    await reading
    expect((await run()).tensor.data.buffer).toBe(buffer)
  })

  it('may be empty', async () => {
    const engine = CapiEngine.open({ threads: 1 })
    const info = { name: 'x', dtype: 'float32', shape: [0, 2] } as const
    const identity = { name: 'i', path: '', opType: 'Identity', domain: '', attributes: {} }
    const nodes = [{ ...identity, inputs: ['x'], outputs: ['y'] }]
    const model = {
      name: 'empty',
      inputs: [info],
      initializers: [],
      nodes,
      values: [],
      outputs: [{ ...info, name: 'y' }],
    }
    const session = await engine.createSession(model)
    expect((await session.run([Tensor.zeros('float32', [0, 2])]))[0]?.shape).toEqual([0, 2])
    await session.release()
    await engine.dispose()
  })

  it('is not read beyond what an operator of our own is given', async () => {
    const engine = CapiEngine.open({ threads: 2 })
    const onnx = new OnnxBuilder(engine.target)
    const x = onnx.input({ name: 'x', dtype: 'float32', shape: [2, 3] })
    const weight = onnx.input({ name: 'weight', dtype: 'bfloat16', shape: [4, 5] })
    const y = onnx.within('projection', () => onnx.op('rankwise.Linear', [weight, x]))
    const session = await engine.createSession(onnx.build('wide', [{ name: y, dtype: 'float32', shape: [2, 4] }]))
    const running = session.run([Tensor.zeros('float32', [2, 3]), Tensor.zeros('bfloat16', [4, 5])])
    const message = expect.stringContaining('as many columns as its input has')
    await expect(running).rejects.toMatchObject({ code: 'ORT_RUN', where: 'projection', message })
    await session.release()
    await engine.dispose()
  })

  it('is there for a run while the backend is disposed of', async () => {
    const { backend, executable, run } = await block(256)
    const running = [run(), run(), run()]
    const freeing = [executable.dispose(), backend.dispose(), backend.dispose()]
    for (const result of await Promise.all(running)) expect(result.shape).toEqual([1, 256, 384])
    await Promise.all(freeing)
    expect(backend.memory()).toEqual({ weightBytes: 0, mappedBytes: 0, executables: 0 })
  })

  it('is not asked for again by later steps', async () => {
    const { growth, after, taken, kept } = (await inProcess('steps')) as Record<'growth' | 'taken' | 'kept', number> & {
      after: object
    }
    // 50 steps with results of 96 pages each; V8's own heap grows by some.
    expect(growth).toBeLessThan(500)
    expect(after).toEqual({ weightBytes: 0, mappedBytes: 0, executables: 0 })
    expect(taken).toBeGreaterThan(5000)
    expect(kept).toBeLessThan(taken / 2)
  })
})

capi('a process', () => {
  it.each([
    ['capi', 'binding'],
    ['binding', 'capi'],
  ])('computes the same on %s, then on %s, on any number of threads', async (...engines) => {
    const { float32, bfloat16 } = (await inProcess('both', ...engines)) as { float32: number; bfloat16: number }
    expect(float32).toBe(0)
    expect(bfloat16).toBeLessThan(2e-6)
  })

  it('has an event loop that goes on meanwhile', async () => {
    const { busyPerStep, ticks } = (await inProcess('loop')) as { busyPerStep: number; ticks: number }
    expect(busyPerStep).toBeLessThan(20)
    expect(ticks).toBeGreaterThan(20)
  })

  it('ends while a segment is computed', async () => {
    expect(await inProcess('exit')).toBe('running')
  })

  it('computes in several threads of JavaScript, and goes on when one is stopped', async () => {
    expect(await inProcess('workers')).toMatchObject({ distances: [0, 0], again: 77 * 384 })
  })

  it('pins every thread to a processor', async () => {
    const { first } = placeThreads(1)
    expect(await inProcess('pinned', '1')).toContain(String(first))
  })
})

describe('processors', () => {
  const launch = (localRank: number) => ({
    RANK: String(localRank),
    WORLD_SIZE: '2',
    LOCAL_RANK: String(localRank),
    LOCAL_WORLD_SIZE: '2',
    MASTER_ADDR: '127.0.0.1',
    MASTER_PORT: '29500',
  })

  it('are read as Linux lists them', () => {
    expect(parseProcessors('0-3,8')).toEqual([0, 1, 2, 3, 8])
    expect(parseProcessors('5')).toEqual([5])
  })

  it('are other ones for every rank', () => {
    expect(placeThreads(2, [0, 1, 4, 5], launch(0))).toEqual({ first: 0, pool: '2' })
    expect(placeThreads(2, [0, 1, 4, 5], launch(1))).toEqual({ first: 4, pool: '6' })
    expect(placeThreads(1, [3], {})).toEqual({ first: 3, pool: undefined })
    expect(placeThreads(3, [3, 4, 5], {})).toEqual({ first: 3, pool: '5;6' })
  })

  it('are not enough', async () => {
    expect(() => placeThreads(2, [0, 1, 4], launch(1))).toThrow(expect.objectContaining({ code: 'BACKEND_PINNING' }))
    const binding = ort({ device: 'cpu', engine: 'binding', pinThreads: true })
    await expect(binding).rejects.toMatchObject({ code: 'BACKEND_PINNING' })
  })
})

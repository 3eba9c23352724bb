import { normal, opGraph, segmentOf } from '@rankwise/conformance'
import {
  type Backend,
  Checkpoint,
  type DeviceTensor,
  type Executable,
  embedding,
  Linear,
  Module,
  Parameter,
  type Segment,
  type ShardSource,
  Tensor,
  type TracedTensor,
  trace,
} from '@rankwise/core'
import { referencePath } from '@rankwise/fixtures'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import type { Engine } from '../src/engine.ts'
import { tfjs } from '../src/index.ts'
import { WasmRuntime } from '../src/wasm/wasm-runtime.ts'
import { ENGINES, engineOf } from './engines.ts'

class TextEncoder extends Module {
  readonly embed_tokens: Embed
  readonly proj: Linear

  constructor() {
    super()
    this.embed_tokens = new Embed()
    this.proj = new Linear(3, 2)
  }

  override forward(ids: TracedTensor): TracedTensor {
    return this.proj.call(this.embed_tokens.call(ids))
  }
}

class Embed extends Module {
  readonly weight = new Parameter([5, 3])

  override forward(ids: TracedTensor): TracedTensor {
    return embedding(ids, this.weight)
  }
}

function encoderSegment(): Segment {
  const model = new TextEncoder()
  return segmentOf(
    trace('encoder', model, { ids: { dtype: 'int32', shape: [4] } }, ({ ids }) => ({ y: model.call(ids) })),
  )
}

const WEIGHTS = [normal([5, 3], 1), normal([2, 3], 2), normal([2], 3)]
const directory = referencePath('flux2-tiny-bf16', 'transformer')
const name = 'single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight'

describe.each(ENGINES)('on %s', (engineName) => {
  let backend: Backend
  /** Counts the tensors of the process. */
  let engine: Engine
  let before: number
  beforeEach(async () => {
    engine = await engineOf(engineName)
    before = engine.liveTensors
    backend = await tfjs({ engine: engineName, threads: 1 })
  })
  afterEach(() => backend.dispose())

  const upload = (tensors: readonly Tensor[]) => tensors.map((tensor) => backend.upload(tensor))
  const ids = (...values: number[]) => upload([Tensor.int32([values.length], values)])

  async function valuesOf(results: readonly DeviceTensor[]): Promise<number[][]> {
    const tensors = await Promise.all(results.map((result) => backend.download(result)))
    return tensors.map(({ data }) => [...(data as Float32Array)])
  }

  describe('compile and run', () => {
    it('gives copies: writing to one download changes no other', async () => {
      const [tensor] = upload([Tensor.float32([2], [1, 2])]) as [DeviceTensor]
      const first = await backend.download(tensor)
      first.data[0] = 9
      expect([...(await backend.download(tensor)).data]).toEqual([1, 2])
    })

    it('gives several outputs, one value twice, and an input as an output', async () => {
      const segment = segmentOf(opGraph('sub', [normal([2], 0), normal([2], 0)], {}))
      const [output, input] = [segment.outputs[0], segment.inputs[1]]
      const outputs = [output, input, output] as Segment['outputs']
      const executable = await backend.compile({ ...segment, outputs })
      const given = upload([Tensor.float32([2], [5, 6]), Tensor.float32([2], [1, 2])])
      const results = await executable.run(given, [])
      for (const tensor of given) tensor.dispose()
      results[0]?.dispose()
      expect(await valuesOf(results.slice(1))).toEqual([
        [1, 2],
        [4, 4],
      ])
    })

    it('does not run what nothing needs', async () => {
      const segment = encoderSegment()
      const [embed] = segment.nodes
      const executable = await backend.compile({ ...segment, outputs: embed?.outputs ?? [] })
      const [result] = await executable.run(ids(1, 1, 1, 1), upload(WEIGHTS))
      expect(result?.shape).toEqual([4, 3])
    })

    it('names the module whose operation fails while it runs', async () => {
      const executable = await backend.compile(encoderSegment())
      const weights = upload(WEIGHTS)
      for (const id of [5, -1]) {
        await expect(executable.run(ids(0, 0, id, 0), weights)).rejects.toMatchObject({
          code: 'EMBEDDING_ID',
          where: 'embed_tokens',
          actual: { id, position: 2, entries: 5 },
        })
      }
    })

    it('names the module whose kernel fails', async () => {
      const operands = [normal([2, 3], 0), normal([2, 3], 0)]
      const segment = segmentOf(opGraph('concat', operands, { dim: 0 }))
      const nodes = segment.nodes.map((node) => ({ ...node, attributes: { dim: 7 } }))
      const executable = await backend.compile({ ...segment, nodes })
      await expect(executable.run(upload(operands), [])).rejects.toMatchObject({
        code: 'TFJS_RUN',
        where: 'module',
        cause: expect.any(Error),
      })
    })

    it('says when a segment computes another shape than its graph says', async () => {
      const graph = opGraph('transpose', [normal([2, 3], 0)], { permutation: [1, 0] })
      const nodes = graph.nodes.map((node) => ({ ...node, attributes: { permutation: [0, 1] } }))
      const executable = await backend.compile(segmentOf({ ...graph, nodes }))
      await expect(executable.run(upload([normal([2, 3], 0)]), [])).rejects.toMatchObject({ code: 'TFJS_SHAPE' })
    })
  })

  describe('arguments', () => {
    let executable: Executable
    beforeEach(async () => {
      executable = await backend.compile(encoderSegment())
    })

    it('may be disposed while the segment runs', async () => {
      const [given, weights] = [ids(1, 2, 3, 4), upload(WEIGHTS)]
      const running = executable.run(given, weights)
      for (const tensor of [...given, ...weights]) tensor.dispose()
      expect((await running)[0]?.shape).toEqual([4, 2])
    })
  })

  describe('loadShard', () => {
    it('counts the bytes of the weights that are loaded', async () => {
      await using checkpoint = await Checkpoint.open(directory)
      const source = checkpoint.source(name)
      const load = () => backend.loadShard(source, { dtype: 'float32' })
      const [first, second] = [await load(), await load()]
      expect(backend.memory().weightBytes).toBe(4 * source.byteLength)
      first.dispose()
      first.dispose()
      expect(backend.memory()).toEqual({ weightBytes: 2 * source.byteLength, mappedBytes: 0, executables: 0 })
      await backend.dispose()
      expect(backend.memory().weightBytes).toBe(0)
      await expect(backend.download(second)).rejects.toMatchObject({ code: 'TENSOR_DISPOSED' })
      expect(engine.liveTensors).toBe(before)
    })

    it('stops when it is aborted', async () => {
      await using checkpoint = await Checkpoint.open(directory)
      const loading = backend.loadShard(checkpoint.source(name), { dtype: 'float32', signal: AbortSignal.abort() })
      await expect(loading).rejects.toMatchObject({ code: 'ABORTED' })
      const controller = new AbortController()
      const source = checkpoint.source(name)
      const reading = { ...source, read: () => source.read().finally(() => controller.abort()) }
      await expect(
        backend.loadShard({ ...reading, ranges: unread }, { dtype: 'float32', signal: controller.signal }),
      ).rejects.toMatchObject({ code: 'ABORTED' })
      expect(backend.memory().weightBytes).toBe(0)
      expect(engine.liveTensors).toBe(before)
    })
  })

  describe('dispose', () => {
    it('frees what was uploaded and computed, when that is disposed', async () => {
      const executable = await backend.compile(encoderSegment())
      const given = [...ids(1, 2, 3, 4), ...upload(WEIGHTS)]
      const results = await executable.run(given.slice(0, 1), given.slice(1))
      for (const tensor of [...given, ...results]) tensor.dispose()
      await executable.dispose()
      expect(engine.liveTensors).toBe(before)
    })
  })
})

function unread(): never {
  throw new Error('was read')
}

describe('the heap of WebAssembly', () => {
  /** A float16 weight of 2 GiB. */
  const large = (tensorName: string): ShardSource => ({
    name: tensorName,
    file: '/model.safetensors',
    dtype: 'float16',
    fullShape: [2 ** 15, 2 ** 15],
    slices: undefined,
    shape: [2 ** 15, 2 ** 15],
    byteLength: 2 ** 31,
    ranges: unread,
    read: unread,
  })

  it('refuses weights that do not fit, before it reads', async () => {
    await using backend = await tfjs({ engine: 'wasm' })
    await expect(backend.loadShard(large('weight'), { dtype: 'float32' })).rejects.toMatchObject({
      code: 'BACKEND_MEMORY',
      where: 'weight',
      actual: { shardBytes: 2 ** 32, heldBytes: 0 },
    })
    const half = { ...large('half'), shape: [2 ** 14, 2 ** 15] }
    expect(() => backend.requireRoom([half])).not.toThrow()
    expect(() => backend.requireRoom([half, half])).toThrow(expect.objectContaining({ code: 'BACKEND_MEMORY' }))
  })

  it('is not written to when it is full', async () => {
    const { module } = await WasmRuntime.load()
    const addresses: number[] = []
    const fill = () => {
      for (let i = 0; i < 17; i++) addresses.push(module._malloc(2 ** 28) >>> 0)
    }
    expect(fill).toThrow(expect.objectContaining({ code: 'BACKEND_MEMORY' }))
    expect(addresses).toHaveLength(15)
    for (const address of addresses) module._free(address)
    module._free(module._malloc(2 ** 28))
  })
})

describe('options', () => {
  it.each([
    [{ engine: 'webgl' as never }, 'BACKEND_ENGINE'],
    [{ float32MatmulPrecision: 'high' as never }, 'BACKEND_PRECISION'],
    [{ threads: 0 }, 'BACKEND_THREADS'],
    [{ engine: 'wasm' as const, threads: 2 }, 'BACKEND_THREADS'],
    [{ engine: 'native-gpu' as const, threads: 1 }, 'TFJS_ENGINE'],
  ])('%j are refused with %s', async (options, code) => {
    await expect(tfjs(options)).rejects.toMatchObject({ code })
  })

  it('auto takes the fastest that there is, and says why nothing faster', async () => {
    await using backend = await tfjs({ threads: 1 })
    expect(backend.engine).toBe(ENGINES.at(-1))
    const reasons = backend.selection.rejected.map(({ engine, reason }) => [engine, reason])
    expect(reasons.map(([engine]) => engine)).toEqual(
      ENGINES.includes('native') ? ['native-gpu'] : ['native-gpu', 'native'],
    )
    for (const [, reason] of reasons) expect(reason).toContain('TFJS_ENGINE')
  })
})

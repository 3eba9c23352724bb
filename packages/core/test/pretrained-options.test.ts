import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import {
  type Collectives,
  type FromPretrainedOptions,
  initProcessGroup,
  registerCollectives,
  Tensor,
  TensorParallelConfig,
  writeSafetensors,
} from '../src/index.ts'
import { ReferenceBackend } from '../src/reference/index.ts'
import { Mlp, mlpWeights } from './mlp-model.ts'

class Unplanned extends Mlp {
  static override readonly tensorParallelPlan = undefined
}

let empty: string
let complete: string

beforeAll(async () => {
  empty = await mkdtemp(join(tmpdir(), 'rankwise-refusals-'))
  complete = await mkdtemp(join(tmpdir(), 'rankwise-refusals-'))
  for (const folder of [empty, complete]) await writeFile(join(folder, 'config.json'), '{}')
  await writeSafetensors(join(complete, 'diffusion_pytorch_model.safetensors'), mlpWeights())
})
afterAll(async () => {
  for (const folder of [empty, complete]) await rm(folder, { recursive: true })
})

const backend = new ReferenceBackend()
const tp = (tpDegree: number) => new TensorParallelConfig({ tpDegree })

/** Options that TypeScript would not let through: JavaScript does. */
const untyped = (options: object) => ({ backend, ...options }) as FromPretrainedOptions

describe('fromPretrained refuses before any weight is read', () => {
  // The folder has no weights: whoever gets as far as them fails with CHECKPOINT_NOT_FOUND.
  it.each<[string, object, string]>([
    ['a device map', { deviceMap: 'auto' }, 'DEVICE_MAP_UNSUPPORTED'],
    ['a quantization config', { quantizationConfig: { bits: 4 } }, 'QUANTIZATION_UNSUPPORTED'],
    ['lowCpuMemUsage: false', { lowCpuMemUsage: false }, 'LOW_CPU_MEM_USAGE_REQUIRED'],
    ['flashpack', { useFlashpack: true }, 'FLASHPACK_UNSUPPORTED'],
    ['useSafetensors: false', { useSafetensors: false }, 'CHECKPOINT_FORMAT'],
    ['ignoreMismatchedSizes', { ignoreMismatchedSizes: true }, 'MISMATCHED_SIZES_UNSUPPORTED'],
    ['an offload folder', { offloadFolder: '/tmp' }, 'OFFLOAD_UNSUPPORTED'],
    ['an offloaded state dict', { offloadStateDict: true }, 'OFFLOAD_UNSUPPORTED'],
    ['a DDUF file', { ddufFile: 'flux.dduf' }, 'CHECKPOINT_FORMAT'],
    ['adapters', { adapters: ['style'] }, 'ADAPTERS_UNSUPPORTED'],
    ['an option that nobody has', { torchDtype: 'float32' }, 'OPTION_UNKNOWN'],
    ['a dtype the backend cannot take', { dtype: 'int32' }, 'DTYPE_UNSUPPORTED'],
    [
      'context parallelism',
      { parallelConfig: { contextParallelConfig: { ringDegree: 2 } } },
      'CONTEXT_PARALLEL_UNSUPPORTED',
    ],
    ['both parallelisms', { parallelConfig: { tpDegree: 2, ringDegree: 2 } }, 'CONTEXT_PARALLEL_UNSUPPORTED'],
    ['a plain object as config', { parallelConfig: { tpDegree: 2 } }, 'PARALLEL_CONFIG_INVALID'],
  ])('%s, alone and with tensor parallelism', async (_name, options, code) => {
    await expect(Mlp.fromPretrained(empty, untyped(options))).rejects.toMatchObject({ code })
    const together = untyped({ parallelConfig: tp(1), ...options })
    await expect(Mlp.fromPretrained(empty, together)).rejects.toMatchObject({ code })
  })

  it.each<[string, unknown]>([
    ...[
      'revision',
      'token',
      'cacheDir',
      'localFilesOnly',
      'endpoint',
      'download',
      'subfolder',
      'backend',
      'signal',
    ].map((name): [string, unknown] => [name, null]),
    ['token', true],
    ['localFilesOnly', 'no'],
    ['download', 'slices'],
    ['backend', undefined],
    ['backend', 'ort'],
    ['signal', new AbortController()],
    ['onProgress', true],
  ])('%s as %s', async (name, value) => {
    const refused = Mlp.fromPretrained(empty, untyped({ [name]: value }))
    await expect(refused).rejects.toMatchObject({ code: 'OPTION_INVALID', message: expect.stringContaining(name) })
  })

  it.each([undefined, null])('no options, as %s', async (options) => {
    const refused = Mlp.fromPretrained(empty, options as never)
    await expect(refused).rejects.toMatchObject({ code: 'OPTION_INVALID', message: expect.stringContaining('backend') })
  })

  it('takes the harmless values of options it does not have', async () => {
    const harmless = { deviceMap: null, lowCpuMemUsage: true, useSafetensors: true, ignoreMismatchedSizes: false }
    await expect(Mlp.fromPretrained(empty, untyped(harmless))).rejects.toMatchObject({ code: 'CHECKPOINT_NOT_FOUND' })
  })

  it('a config.json of a quantized model', async () => {
    const folder = await mkdtemp(join(tmpdir(), 'rankwise-quantized-'))
    await writeFile(
      join(folder, 'config.json'),
      JSON.stringify({ quantization_config: { quant_method: 'bitsandbytes' } }),
    )
    const loading = Mlp.fromPretrained(folder, { backend })
    await expect(loading).rejects.toMatchObject({
      code: 'QUANTIZATION_UNSUPPORTED',
      message: expect.stringContaining('bitsandbytes'),
    })
    await rm(folder, { recursive: true })
  })

  it.each([
    ['flux.dduf', 'CHECKPOINT_FORMAT'],
    ['flux.gguf', 'CHECKPOINT_FORMAT'],
    ['model.bin', 'CHECKPOINT_FORMAT'],
    ['pytorch_lora_weights.safetensors', 'ADAPTERS_UNSUPPORTED'],
    ['adapter_model.safetensors', 'ADAPTERS_UNSUPPORTED'],
    ['My-LoRA-v2.safetensors', 'ADAPTERS_UNSUPPORTED'],
    ['flux.safetensors', 'CONFIG_NOT_FOUND'],
  ])('%s, as a file and alone in a folder', async (file, code) => {
    const folder = await mkdtemp(join(tmpdir(), 'rankwise-foreign-'))
    await writeFile(join(folder, file), 'x')
    await expect(Mlp.fromPretrained(folder, { backend })).rejects.toMatchObject({ code })
    await expect(Mlp.fromPretrained(join(folder, file), { backend })).rejects.toMatchObject({ code })
    await rm(folder, { recursive: true })
  })

  it.each([
    'layers.0.lora_A.weight',
    'base_model.model.layers.0.lora_B.default.weight',
    'layers.0.base_layer.weight',
    'transformer.layers.0.lora.up.weight',
    'layers.0.lokr_w1',
  ])('a checkpoint with the adapter weight %s', async (name) => {
    const folder = await mkdtemp(join(tmpdir(), 'rankwise-adapter-'))
    await writeFile(join(folder, 'config.json'), '{}')
    const weights = new Map([...mlpWeights(), [name, Tensor.zeros('float32', [4, 4])] as const])
    await writeSafetensors(join(folder, 'diffusion_pytorch_model.safetensors'), weights)
    await expect(Mlp.fromPretrained(folder, { backend })).rejects.toMatchObject({ code: 'ADAPTERS_UNSUPPORTED' })
    await rm(folder, { recursive: true })
  })

  it.each(['bin', 'pt', 'ckpt', 'gguf', 'dduf'])('weights as .%s', async (ending) => {
    const folder = await mkdtemp(join(tmpdir(), 'rankwise-format-'))
    await writeFile(join(folder, 'config.json'), '{}')
    await writeFile(join(folder, `diffusion_pytorch_model.${ending}`), 'x')
    await expect(Mlp.fromPretrained(folder, { backend })).rejects.toMatchObject({ code: 'CHECKPOINT_FORMAT' })
    await rm(folder, { recursive: true })
  })

  it.each([0, -1, 1.5, Number.NaN, Number.POSITIVE_INFINITY, '2'])('the degree %s', (tpDegree) => {
    expect(() => new TensorParallelConfig({ tpDegree: tpDegree as number })).toThrow(/TP_DEGREE_INVALID/)
  })

  it('a class without a plan', async () => {
    await expect(Unplanned.fromPretrained(empty, { backend, parallelConfig: tp(2) })).rejects.toMatchObject({
      code: 'PLAN_MISSING',
    })
  })

  it('a degree without a process group, and one larger than it', async () => {
    const options = { backend, parallelConfig: tp(2) }
    await expect(Mlp.fromPretrained(empty, options)).rejects.toMatchObject({ code: 'PROCESS_GROUP_NOT_INITIALIZED' })
    registerCollectives(
      'alone',
      async () => ({ rank: 0, worldSize: 1, destroy: async () => {} }) as unknown as Collectives,
    )
    await using _group = await initProcessGroup({ backend: 'alone' })
    await expect(Mlp.fromPretrained(empty, options)).rejects.toMatchObject({
      code: 'TP_DEGREE_WORLD_SIZE',
      actual: { tpDegree: 2, worldSize: 1 },
    })
  })

  it('weights of other shapes than the config says', async () => {
    const folder = await mkdtemp(join(tmpdir(), 'rankwise-shapes-'))
    await writeFile(join(folder, 'config.json'), '{}')
    const weights = new Map([...new Mlp().namedParameters()].map(([name]) => [name, Tensor.zeros('float32', [4, 4])]))
    await writeSafetensors(join(folder, 'diffusion_pytorch_model.safetensors'), weights)
    await expect(Mlp.fromPretrained(folder, { backend })).rejects.toMatchObject({ code: 'WEIGHTS_SHAPE' })
    await rm(folder, { recursive: true })
  })
})

describe('enableParallelism', () => {
  const x = Tensor.float32([2, 4], [1, 2, 3, 4, -1, 0.5, 0, 2])

  it('splits a model once, frees the whole weights, and computes the same', async () => {
    const own = new ReferenceBackend()
    const model = await Mlp.fromPretrained(complete, { backend: own })
    const before = await model.run(x)
    const { weightBytes } = own.memory()
    await model.enableParallelism(tp(1))
    expect(own.memory()).toEqual({ weightBytes, mappedBytes: 0, executables: 0 })
    expect(await model.run(x)).toEqual(before)
    await expect(model.enableParallelism(tp(1))).rejects.toMatchObject({ code: 'PARALLEL_ALREADY' })
    await model.dispose()
    expect(own.memory()).toEqual({ weightBytes: 0, mappedBytes: 0, executables: 0 })
  })

  it('refuses what fromPretrained refuses, and leaves the model as it was', async () => {
    const model = await Mlp.fromPretrained(complete, { backend })
    const before = await model.run(x)
    const { weightBytes } = backend.memory()
    await expect(model.enableParallelism(tp(2))).rejects.toMatchObject({ code: 'PROCESS_GROUP_NOT_INITIALIZED' })
    await expect(model.enableParallelism(tp(3))).rejects.toMatchObject({ code: 'BLOCK_NOT_DIVISIBLE' })
    const context = { contextParallelConfig: {} } as unknown as TensorParallelConfig
    await expect(model.enableParallelism(context)).rejects.toMatchObject({ code: 'CONTEXT_PARALLEL_UNSUPPORTED' })
    expect(await model.run(x)).toEqual(before)
    expect(backend.memory().weightBytes).toBe(weightBytes)
    await model.dispose()
    await expect(model.enableParallelism(tp(1))).rejects.toMatchObject({ code: 'MODEL_NOT_LOADED' })
  })

  it('refuses a second call while the first is under way, which may be repeated once it has failed', async () => {
    const own = new ReferenceBackend()
    const model = await Mlp.fromPretrained(complete, { backend: own })
    const before = await model.run(x)
    const { weightBytes } = own.memory()
    const aborted = { signal: AbortSignal.abort() }
    await expect(model.enableParallelism(tp(1), aborted)).rejects.toMatchObject({ code: 'ABORTED' })
    const calls = [model.enableParallelism(tp(1)), model.enableParallelism(tp(1))]
    const [first, second] = await Promise.allSettled(calls)
    expect(first).toMatchObject({ status: 'fulfilled' })
    expect(second).toMatchObject({ status: 'rejected', reason: { code: 'PARALLEL_ALREADY' } })
    expect(own.memory().weightBytes).toBe(weightBytes)
    expect(await model.run(x)).toEqual(before)
    await model.dispose()
  })

  it('does not bring back a model that is disposed meanwhile', async () => {
    const own = new ReferenceBackend()
    const model = await Mlp.fromPretrained(complete, { backend: own })
    const splitting = model.enableParallelism(tp(1))
    await model.dispose()
    await expect(splitting).rejects.toMatchObject({ name: 'RankwiseError' })
    await expect(model.run(x)).rejects.toMatchObject({ code: 'MODEL_NOT_LOADED' })
    expect(own.memory()).toEqual({ weightBytes: 0, mappedBytes: 0, executables: 0 })
  })

  it('lets runs that were begun before end one way or the other, and later ones compute the same', async () => {
    const own = new ReferenceBackend()
    const model = await Mlp.fromPretrained(complete, { backend: own })
    const before = await model.run(x)
    const early = Array.from({ length: 3 }, () => model.run(x).catch((error: { code: string }) => error.code))
    await model.enableParallelism(tp(1))
    for (const result of await Promise.all(early)) expect([before, 'EXECUTOR_DISPOSED']).toContainEqual(result)
    expect(await model.run(x)).toEqual(before)
    await model.dispose()
    expect(own.memory()).toEqual({ weightBytes: 0, mappedBytes: 0, executables: 0 })
  })

  it('refuses a model that was loaded split, and a class without a plan', async () => {
    const split = await Mlp.fromPretrained(complete, { backend, parallelConfig: tp(1) })
    await expect(split.enableParallelism(tp(1))).rejects.toMatchObject({ code: 'PARALLEL_ALREADY' })
    await split.dispose()
    const unplanned = await Unplanned.fromPretrained(complete, { backend })
    await expect(unplanned.enableParallelism(tp(1))).rejects.toMatchObject({ code: 'PLAN_MISSING' })
    await unplanned.dispose()
  })
})

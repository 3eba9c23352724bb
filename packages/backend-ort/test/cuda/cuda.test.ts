import { normal, opGraph, segmentOf } from '@rankwise/conformance'
import { type DeviceTensor, Tensor } from '@rankwise/core'
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it, onTestFinished } from 'vitest'
import { leaks } from '../../../collectives-nccl/test/stub.ts'
import type { OrtBackend } from '../../src/backend.ts'
import { chooseDevice, cudartCandidates } from '../../src/cuda/devices.ts'
import { type OrtOptions, ort } from '../../src/index.ts'
import { sourceOf } from '../workers/placed-block.ts'
import { compileBlocks, placedBlocks } from './blocks.ts'
import { FakeCuda, fakeAddon, fakeBackend, NO_FAKE } from './fake-cuda.ts'

const TYPE = { dtype: 'float32', shape: [2, 3] } as const
const X = normal(TYPE.shape, 1)
const SILU = segmentOf(opGraph('silu', [TYPE], {}))

describe('a GPU is refused', () => {
  it.each<[what: string, options: Partial<OrtOptions>, code: string]>([
    ['with the binding', { engine: 'binding' }, 'BACKEND_ENGINE'],
    ['with an engine that there is not', { engine: 'none' as 'capi' }, 'BACKEND_ENGINE'],
    ['with threads', { threads: 2 }, 'BACKEND_THREADS'],
    ['with pinned threads', { pinThreads: true }, 'BACKEND_PINNING'],
    ['with mapped weights', { weights: 'mapped' }, 'BACKEND_WEIGHTS'],
  ])('%s', async (_what, options, code) => {
    await expect(ort({ device: 'cuda', ...options })).rejects.toMatchObject({
      code,
      rule: expect.stringMatching('on a GPU'),
    })
  })

  it('to who asks for a number on the CPU', async () => {
    await expect(ort({ device: 'cpu', deviceId: 0 })).rejects.toMatchObject({ code: 'BACKEND_DEVICE' })
  })

  it('where its number is not that of one', () => {
    const place = { MASTER_ADDR: '127.0.0.1', MASTER_PORT: '29500' }
    const third = { RANK: '2', WORLD_SIZE: '4', LOCAL_RANK: '2', LOCAL_WORLD_SIZE: '4', ...place }
    expect(chooseDevice(4, undefined, {})).toBe(0)
    expect(chooseDevice(4, 3, third)).toBe(3)
    expect(chooseDevice(4, undefined, third)).toBe(2)
    expect(chooseDevice(1, undefined, third)).toBe(0)
    const refused = expect.objectContaining({ code: 'ORT_CUDA', actual: expect.objectContaining({ visibleGpus: 4 }) })
    for (const device of [4, -1, 0.5]) expect(() => chooseDevice(4, device, {})).toThrow(refused)
    expect(() => chooseDevice(2, undefined, third)).toThrow(expect.objectContaining({ code: 'ORT_CUDA' }))
  })

  it('where there is no CUDA, with what is missing and how to get it', async () => {
    const before = process.env.RANKWISE_CUDART_LIBRARY
    onTestFinished(() => {
      if (before === undefined) delete process.env.RANKWISE_CUDART_LIBRARY
      else process.env.RANKWISE_CUDART_LIBRARY = before
    })
    process.env.RANKWISE_CUDART_LIBRARY = '/none/libcudart.so.13'
    const error = await ort({ device: 'cuda' }).catch((reason: unknown) => reason)
    expect(error).toMatchObject({ code: 'ORT_CUDA', rule: expect.stringContaining('nothing falls back to the CPU') })
    expect(error).toMatchObject({ remedy: expect.stringMatching(/install|native\/build\.mjs/) })
    if (NO_FAKE === undefined) {
      expect(error).toMatchObject({ actual: { tried: [expect.stringContaining('/none/libcudart.so.13')] } })
    }
  })

  it('looks for libcudart where collectives-nccl does', () => {
    expect(cudartCandidates({})).toEqual(['libcudart.so.13', 'libcudart.so.12'])
    expect(cudartCandidates({ RANKWISE_CUDART_LIBRARY: '/a' })).toEqual(['/a'])
    expect(cudartCandidates({ RANKWISE_NVIDIA_SITE: '/s' })[0]).toBe('/s/nvidia/cu13/lib/libcudart.so.13')
  })
})

describe.skipIf(NO_FAKE !== undefined)('on a fake GPU', () => {
  let fake: FakeCuda
  let log = 0
  beforeAll(() => {
    fake = new FakeCuda()
  })
  afterAll(() => fake[Symbol.dispose]())
  beforeEach(() => {
    Object.assign(process.env, fake.env(0, `log-${++log}`))
  })
  const calls = () => fake.stub.calls(0, `log-${log}`)
  afterEach(() => {
    for (const name of ['STUB_FAULT', 'STUB_ORT_FAULT', 'STUB_DEVICES']) delete process.env[name]
    expect(calls().filter((call) => call.startsWith('VIOLATION'))).toEqual([])
    expect(leaks(calls())).toEqual({})
  })

  /** What two blocks give as bits, and bytes of weights. */
  async function runBlocks(backend: OrtBackend): Promise<readonly number[]> {
    await using _ = backend
    const blocks = placedBlocks(1)
    const executor = await compileBlocks(blocks, backend, undefined)
    const { out } = await executor.run(blocks.inputs)
    const { data } = out as Tensor
    return [...new Uint32Array(data.buffer, data.byteOffset, data.length)]
  }

  it('blocks are the bits that they are on the CPU', async () => {
    const onGpu = await runBlocks(await fakeBackend(2))
    expect(calls()).toContain('option device_id=2')
    expect(calls()).toContain('CreateMemoryInfo Cuda 0 2 0')
    expect(onGpu).toEqual(await runBlocks(await ort({ device: 'cpu', engine: 'capi', threads: 1 })))
  })

  it('a backend says where it computes, and lends no memory of the host', async () => {
    await using backend = await fakeBackend(1)
    expect(backend).toMatchObject({ name: 'ort-cuda', engine: 'capi', selection: { device: 'cuda:1', rejected: [] } })
    expect(backend.borrow).toBeUndefined()
    const value = backend.upload(X)
    expect(backend.deviceMemory?.borrow(value)).toMatchObject({
      dtype: 'float32',
      shape: [2, 3],
      dataPtr: expect.any(BigInt),
    })
    value.dispose()
    expect(() => backend.deviceMemory?.borrow(value)).toThrow(expect.objectContaining({ code: 'TENSOR_DISPOSED' }))
  })

  it('memory of earlier steps is used again, and that of weights is freed with them', async () => {
    await using backend = await fakeBackend()
    const executable = await backend.compile(SILU)
    const step = async () => {
      const given = backend.upload(X)
      const [result] = (await executable.run([given], [])) as [DeviceTensor]
      expect((await backend.download(result)).data).toHaveLength(6)
      for (const tensor of [given, result]) tensor.dispose()
    }
    await step()
    const allocated = () => calls().filter((call) => call.startsWith('cudaMalloc')).length
    const before = allocated()
    for (let i = 0; i < 5; i++) await step()
    expect(allocated()).toBe(before)
    const freed = () => calls().filter((call) => call === 'cudaFree').length
    const freedBefore = freed()
    const weight = await backend.loadShard(sourceOf(X.cast('bfloat16')), { dtype: 'float32' })
    expect(backend.memory()).toEqual({ weightBytes: 12, mappedBytes: 0, executables: 1 })
    weight.dispose()
    expect(freed()).toBe(freedBefore + 1)
    expect(backend.memory().weightBytes).toBe(0)
  })

  it('what is disposed while it is copied stays until it is there', async () => {
    let open = () => {}
    let gate: Promise<void> = Promise.resolve()
    let written: Promise<void> = gate
    const { cudaWrite } = fakeAddon()
    const late: typeof cudaWrite = (...args) => {
      written = gate.then(() => cudaWrite(...args))
      return written
    }
    await using backend = await fakeBackend(0, fakeAddon({ cudaWrite: late }))
    const executable = await backend.compile(SILU)
    gate = new Promise((resolve) => {
      open = resolve
    })
    backend.upload(X).dispose()
    // Frees the memory that is not in use.
    await executable.dispose()
    open()
    await written
  })

  it('ids outside of a table are refused before they are looked up, and computed ones when the segment is compiled', async () => {
    await using backend = await fakeBackend()
    const table = normal([4, 3], 2)
    const segment = segmentOf(opGraph('embedding', [Tensor.int32([1], [0]), table], {}, [1]))
    const executable = await backend.compile(segment)
    const weight = backend.upload(table)
    for (const id of [4, -1]) {
      const running = executable.run([backend.upload(Tensor.int32([1], [id]))], [weight])
      await expect(running).rejects.toMatchObject({
        code: 'ORT_RUN',
        where: 'module',
        actual: { least: id, entries: 4 },
      })
    }
    const [node] = segment.nodes
    const computed = { ...segment, inputs: [] }
    expect(node?.op).toBe('embedding')
    await expect(backend.compile(computed)).rejects.toMatchObject({ code: 'OP_UNSUPPORTED', where: 'module' })
  })

  it('too little memory is told, after what is not in use was freed', async () => {
    await using backend = await fakeBackend()
    backend.upload(X).dispose()
    await backend.download(backend.upload(X))
    const before = calls().length
    process.env.STUB_FAULT = 'malloc'
    const large = normal([64, 64], 1)
    expect(() => backend.upload(large)).toThrow(
      expect.objectContaining({
        code: 'ORT_CUDA_MEMORY',
        message: expect.stringContaining('cudaMalloc: out of memory'),
      }),
    )
    expect(calls().slice(before)).toContain('cudaFree')
    const loading = backend.loadShard(sourceOf(large), { dtype: 'float32' })
    await expect(loading).rejects.toMatchObject({ code: 'ORT_CUDA_MEMORY', actual: { bytes: 64 * 64 * 4 } })
    expect(backend.memory().weightBytes).toBe(0)
    delete process.env.STUB_FAULT
    backend.upload(large).dispose()
  })

  it('a tensor that did not come to the GPU fails what uses it', async () => {
    await using backend = await fakeBackend()
    const executable = await backend.compile(SILU)
    process.env.STUB_FAULT = 'memcpy'
    const given = backend.upload(X)
    await expect(executable.run([given], [])).rejects.toMatchObject({ code: 'ORT_CUDA_COPY' })
    await expect(backend.download(given)).rejects.toMatchObject({ code: 'ORT_CUDA_COPY' })
    await expect(backend.loadShard(sourceOf(X), { dtype: 'float32' })).rejects.toMatchObject({ code: 'ORT_CUDA_COPY' })
    expect(backend.memory().weightBytes).toBe(0)
  })

  it.each<[what: string, env: Record<string, string>, message: RegExp, remedy: string]>([
    [
      'no GPU',
      { STUB_DEVICES: '0' },
      /no GPU that can be used: cudaGetDeviceCount: no CUDA-capable device/,
      'nvidia-smi',
    ],
    [
      'another libcudart than that of the process',
      { RANKWISE_CUDART_LIBRARY: '/none.so' },
      /the CUDA runtime does not load/,
      'RANKWISE_NVIDIA_SITE',
    ],
    [
      'no provider',
      { STUB_ORT_FAULT: '1' },
      /provider does not work: .*libonnxruntime_providers_cuda\.so/,
      'install.js',
    ],
  ])('%s is told', async (_what, env, message, remedy) => {
    Object.assign(process.env, env)
    await expect(fakeBackend()).rejects.toMatchObject({
      code: 'ORT_CUDA',
      message: expect.stringMatching(message),
      remedy: expect.stringContaining(remedy),
    })
  })

  it('the addon reads and writes nothing but memory that it allocated', async () => {
    const addon = fakeAddon()
    const native = addon.open('', 1, null, -1)
    expect(() => addon.cudaStream(native)).toThrow('no GPU')
    await addon.cudaAttach(native, 0)
    const address = addon.cudaAllocate(native, 16)
    for (const wrong of [address - 1n, address + 1n, 0n]) {
      expect(() => addon.cudaWrite(native, wrong, new Float32Array(4))).toThrow('no memory of the GPU')
      expect(() => addon.cudaRead(native, wrong, new Float32Array(4))).toThrow('no memory of the GPU')
    }
    await addon.cudaWrite(native, address, Float32Array.of(1, 2, 3, 4))
    const read = new Float32Array(2)
    await addon.cudaRead(native, address + 8n, read)
    expect([...read]).toEqual([3, 4])
    const graph = addon.describe([{ name: 'x', elementType: 1, itemBytes: 4, shape: [5] }], 1)
    expect(() => addon.run(native, graph, [address])).toThrow('no memory of the GPU')
    expect(() => addon.run(native, graph, [new Float32Array(5)])).toThrow('no memory of the GPU')
    expect(() => addon.cudaFree(native, address + 1n)).toThrow('not allocated')
    await expect(async () => addon.cudaAttach(native, 0)).rejects.toThrow('already')
    // What is left is freed.
    addon.close(native)
    expect(() => addon.cudaAllocate(native, 16)).toThrow('no GPU')
  })
})

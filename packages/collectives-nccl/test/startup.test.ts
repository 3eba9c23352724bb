import { once } from 'node:events'
import { mkdirSync, mkdtempSync, rmSync, symlinkSync } from 'node:fs'
import { createServer } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { setTimeout } from 'node:timers/promises'
import { afterAll, beforeAll, describe, expect, test } from 'vitest'
import { CUDART, loadLibrary, NCCL } from '../src/library.ts'
import { BARRIER, Ranks, type Reply } from './ranks.ts'
import { leaks, NO_COMPILER } from './stub.ts'

async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as { port: number }
  server.close()
  await once(server, 'close')
  return port
}

const codes = (replies: readonly Reply[]) => replies.map(({ error }) => error?.code)

describe.skipIf(process.platform !== 'linux')('libraries', () => {
  test('that cannot be loaded are told with every place, what the linker said, and what to install', async () => {
    const error = await loadLibrary(NCCL, { site: '/nowhere' }, {}).catch((error) => error)
    expect(error).toMatchObject({ code: 'NCCL_LIBRARY' })
    expect(error.message).toMatch('/nowhere/nvidia/nccl/lib/libnccl.so.2: cannot open shared object file')
    expect(error.message).toMatch('pip install nvidia-nccl-cu13')
    expect(error.message).toMatch('RANKWISE_NVIDIA_SITE')
  })

  test('a file that is named is the only one that is tried', async () => {
    const env = { RANKWISE_CUDART_LIBRARY: '/nowhere/libcudart.so', RANKWISE_NVIDIA_SITE: '/elsewhere' }
    const error = await loadLibrary(CUDART, {}, env).catch((error) => error)
    expect(error.actual.tried).toHaveLength(1)
    expect(error.actual.tried[0]).toMatch('/nowhere/libcudart.so')
    const byOption = await loadLibrary(CUDART, { cudart: '/here/libcudart.so' }, env).catch((error) => error)
    expect(byOption.actual.tried[0]).toMatch('/here/libcudart.so')
  })
})

describe.skipIf(NO_COMPILER !== undefined)('joining', () => {
  let ranks: Ranks
  beforeAll(() => {
    ranks = new Ranks(2)
  })
  afterAll(() => ranks?.[Symbol.asyncDispose]())

  const inits = (rank: number) => ranks.calls(rank).filter((line) => line.startsWith('ncclCommInitRankConfig'))

  test('the libraries of a site-packages folder are found', async () => {
    const site = mkdtempSync(join(tmpdir(), 'rankwise-site-'))
    try {
      for (const [folder, name] of [
        ['nvidia/nccl/lib', 'libnccl.so.2'],
        ['nvidia/cuda_runtime/lib', 'libcudart.so.12'],
      ] as const) {
        mkdirSync(join(site, folder), { recursive: true })
        symlinkSync(ranks.stub.library, join(site, folder, name))
      }
      const found = await loadLibrary(CUDART, { site }, {})
      expect(found.from).toBe(join(site, 'nvidia/cuda_runtime/lib/libcudart.so.12'))
      expect((await loadLibrary(NCCL, {}, { RANKWISE_NVIDIA_SITE: site })).from).toBe(
        join(site, 'nvidia/nccl/lib/libnccl.so.2'),
      )
    } finally {
      rmSync(site, { recursive: true })
    }
  })

  test('the identifier of rank 0 and a non-blocking configuration arrive byte for byte', async () => {
    await ranks.init()
    const [identifier] = ranks.calls(0).filter((line) => line.startsWith('ncclGetUniqueId'))
    const id = identifier?.split(' ')[1] as string
    expect(id).toMatch(/^[0-9a-f]{256}$/)
    expect(ranks.calls(1).filter((line) => line.startsWith('ncclGetUniqueId'))).toEqual([])
    const undefinedInt = '00000080'
    const nullPointer = '0000000000000000'
    const config = [
      ['6000000000000000', 'efbefeca', 'df590000'], // size 96, magic, version 23007
      ['00000000', undefinedInt, undefinedInt, undefinedInt, nullPointer], // blocking 0
      [undefinedInt, undefinedInt, nullPointer],
      Array(10).fill(undefinedInt),
    ].flat(2)
    for (const rank of [0, 1]) {
      expect(inits(rank)).toEqual([`ncclCommInitRankConfig 2 ${rank} ${id} ${config.join('')} multi=unset`])
    }
  })

  test('the store of the rendezvous is opened, and closed with the group', async () => {
    await ranks.ready()
    const before = await ranks.all(() => ({ do: 'held' }))
    for (let i = 0; i < 2; i++) {
      const masterPort = await freePort()
      expect(codes(await ranks.tryInit(() => ({ options: { masterPort } })))).toEqual([undefined, undefined])
      await ranks.all(() => ({ do: 'run', call: BARRIER }))
      await ranks.all(() => ({ do: 'destroy' }))
    }
    const held = (values: unknown[]) => (values as { descriptors: number }[]).map(({ descriptors }) => descriptors)
    expect(held(await ranks.all(() => ({ do: 'held' })))).toEqual(held(before))
  })

  test('why rank 0, which holds the store, cannot join reaches the others', async () => {
    const masterPort = await freePort()
    const replies = await ranks.tryInit((rank) => ({
      options: { masterPort },
      env: rank === 0 ? { STUB_DEVICES: '0' } : {},
    }))
    expect(codes(replies)).toEqual(['CUDA_UNAVAILABLE', 'RANK_LOST'])
    expect(replies[1]?.error?.message).toMatch('rank 0 cannot join: [CUDA_UNAVAILABLE]')
  })

  test('every rank takes the GPU of its local rank, or the one that it is told', async () => {
    await ranks.init()
    expect(ranks.calls(1)).toContain('cudaSetDevice 1')
    const replies = await ranks.tryInit((rank) => ({ options: rank === 0 ? { device: 3 } : {} }))
    expect(codes(replies)).toEqual([undefined, undefined])
    expect(ranks.calls(0)).toContain('cudaSetDevice 3')
    expect(ranks.calls(0)).not.toContain('cudaSetDevice 0')
  })

  test('a rank that sees one GPU takes it', async () => {
    const of = (rank: number) => ({ env: { STUB_DEVICES: '1', STUB_PCI_BUS_ID: `0000:0${rank}:00.0` } })
    expect(codes(await ranks.tryInit(of))).toEqual([undefined, undefined])
    expect(ranks.calls(1)).toContain('cudaSetDevice 0')
  })

  describe('two ranks on one GPU', () => {
    const env = { STUB_PCI_BUS_ID: '0000:17:00.0' }

    test('are refused on every rank before NCCL starts', async () => {
      const replies = await ranks.tryInit(() => ({ env }))
      for (const { error } of replies) {
        expect(error).toMatchObject({ code: 'NCCL_SHARED_GPU', actual: { ranks: [0, 1], pciBusId: '0000:17:00.0' } })
      }
      expect(inits(0)).toEqual([])
    })

    test('may be if the user says so, and NCCL is told', async () => {
      expect(codes(await ranks.tryInit(() => ({ env, options: { allowSharedGpu: true } })))).toEqual([
        undefined,
        undefined,
      ])
      expect(inits(0)[0]).toMatch(/multi=1$/)
    })

    test('may not be before NCCL 2.30', async () => {
      const of = () => ({ env: { ...env, STUB_NCCL_VERSION: '22907' }, options: { allowSharedGpu: true } })
      const replies = await ranks.tryInit(of)
      expect(codes(replies)).toEqual(['NCCL_SHARED_GPU', 'NCCL_SHARED_GPU'])
      expect(replies[0]?.error?.actual).toMatchObject({ ncclVersion: '2.29.7' })
    })
  })

  test.each<[string, string, Record<string, string>, RegExp]>([
    ['an old NCCL', 'NCCL_VERSION', { STUB_NCCL_VERSION: '21304' }, /version 2\.13\.4[\s\S]*NCCL 2\.14\.0 or later/],
    [
      'an old CUDA runtime',
      'NCCL_VERSION',
      { STUB_CUDART_VERSION: '11080' },
      /version 11\.8[\s\S]*CUDA 12\.0 or later/,
    ],
    ['no GPU', 'CUDA_UNAVAILABLE', { STUB_DEVICES: '0' }, /cudaErrorNoDevice \(100\): no CUDA-capable device/],
    ['too few GPUs', 'NCCL_DEVICE', { STUB_DEVICES: '2', LOCAL: '5' }, /device 5, visibleGpus 2/],
    ['no library', 'NCCL_LIBRARY', { RANKWISE_NCCL_LIBRARY: '/nowhere/libnccl.so' }, /nowhere/],
  ])('%s on one rank is told there, and the others need not wait', async (_, code, env, text) => {
    const device = env.LOCAL === undefined ? {} : { device: Number(env.LOCAL) }
    const [first, second] = await ranks.tryInit((rank) => (rank === 1 ? { env, options: device } : {}))
    expect(second?.error?.code).toBe(code)
    expect(second?.error?.message).toMatch(text)
    expect(first?.error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [1] } })
    expect(first?.error?.message).toMatch(`rank 1 cannot join: [${code}]`)
    expect(first?.ms).toBeLessThan(2_000)
  })

  test.each<[string, object]>([
    ['stagingBytes', { stagingBytes: 4096 }],
    ['checkFirst', { checkFirst: 7 }],
  ])('ranks that differ in %s are refused on all', async (name, options) => {
    const replies = await ranks.tryInit((rank) => ({ options: rank === 0 ? {} : options }))
    for (const { error } of replies) {
      expect(error?.code).toBe('NCCL_OPTIONS')
      expect(error?.message).toMatch(`the ranks differ in ${name}`)
    }
  })

  test('other versions of NCCL are refused on all, with both', async () => {
    const replies = await ranks.tryInit((rank) => ({ env: rank === 0 ? {} : { STUB_NCCL_VERSION: '22907' } }))
    expect(codes(replies)).toEqual(['NCCL_OPTIONS', 'NCCL_OPTIONS'])
    expect(replies[0]?.error?.actual).toMatchObject({ 'rank 0': '2.30.7', 'rank 1': '2.29.7' })
  })

  test.each([
    { stagingBytes: 0 },
    { stagingBytes: 1000 },
    { stagingBytes: 2 ** 31 },
    { checkFirst: -1 },
    { checkFirst: 0.5 },
  ])('%j is refused', async (options) => {
    const [first, second] = await ranks.tryInit((rank) => ({ options: rank === 0 ? options : {} }))
    expect(first?.error?.code).toBe('NCCL_OPTIONS')
    expect(second?.error?.code).toBe('RANK_LOST')
  })

  test('a rank that does not come is named', async () => {
    const [first] = await ranks.tryInit((rank) => (rank === 0 ? { options: { timeoutMs: 300 } } : { stays: 'away' }))
    expect(first?.error?.code).toBe('RENDEZVOUS_TIMEOUT')
    expect(first?.error?.message).toMatch('rank 1 did not join the group in time')
  })

  test('waiting for the others can be aborted', async () => {
    const joining = ranks.tryInit((rank) => (rank === 0 ? {} : { stays: 'away' }))
    await setTimeout(300)
    await ranks.ask(0, { do: 'abortSignal' })
    expect((await joining)[0]?.error?.code).toBe('ABORTED')
  })

  test('an identifier that cannot be created is told', async () => {
    const replies = await ranks.tryInit((rank) => ({ env: rank === 0 ? { STUB_FAULT: 'unique-id' } : {} }))
    expect(codes(replies)).toEqual(['NCCL_ERROR', 'RANK_LOST'])
  })

  test.each<[string, string, string[]]>([
    ['that fails on one rank', 'init:2', ['RANK_LOST', 'NCCL_ERROR']],
    ['that hangs', 'init-hang', ['COLLECTIVE_TIMEOUT', 'COLLECTIVE_TIMEOUT']],
    ['without memory for the group', 'malloc', ['RANK_LOST', 'CUDA_ERROR']],
  ])('a start of NCCL %s ends it on all, and frees what was taken', async (_, fault, expected) => {
    const replies = await ranks.tryInit((rank) => ({
      options: { timeoutMs: 1_500 },
      env: rank === 1 ? { STUB_FAULT: fault } : {},
    }))
    // NCCL is up on a rank whose partner only failed after it: it learns of it at the first operation.
    if (replies[0]?.error === undefined) replies[0] = await ranks.run(0, BARRIER)
    expect(codes(replies)).toEqual(expected)
    await ranks.all(() => ({ do: 'destroy' }))
    for (const rank of [0, 1]) expect(leaks(ranks.calls(rank))).toEqual({})
  })

  test('a rank that is killed while NCCL starts is named', async () => {
    const joining = ranks.tryInit((rank) => ({ env: rank === 1 ? { STUB_FAULT: 'init-hang' } : {} }))
    await setTimeout(600)
    ranks.kill(1, 'SIGKILL')
    const [first] = await joining
    expect(first?.error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [1] } })
  })
})

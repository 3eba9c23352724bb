import { existsSync, readFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { beforeAll, describe, expect, test } from 'vitest'
import { CUDA_PROTOTYPES, CudaRuntime } from '../src/cuda-runtime.ts'
import { ncclCollectives } from '../src/index.ts'
import { NCCL_PROTOTYPES, NCCL_THREADED, Nccl, ncclVersionText, UNIQUE_ID } from '../src/nccl.ts'
import { CONFIG_FIELDS } from '../src/nccl-config.ts'
import { MemoryStore } from './memory-store.ts'

// The real libraries, without a driver: a site-packages folder with nvidia-nccl-cu13 and nvidia-cuda-runtime.
const SITE = process.env.RANKWISE_NVIDIA_SITE
const hasLibraries = SITE !== undefined && existsSync(join(SITE, 'nvidia/nccl/lib/libnccl.so.2'))
if (!hasLibraries) {
  process.stderr.write(
    'SKIPPED: tests of collectives-nccl against the real libnccl and libcudart: RANKWISE_NVIDIA_SITE names no folder with ' +
      'them (pip install --target FOLDER nvidia-nccl-cu13 nvidia-cuda-runtime)\n',
  )
}

/** Arguments of every function that a C header declares, each as an int, a size_t, a pointer or a struct. */
function prototypesOf(header: string): Map<string, string[]> {
  const declarations = header
    .replace(/\/\*[\s\S]*?\*\//g, ' ')
    // Defaults that only C++ sees.
    .replace(/__dv\([^)]*\)/g, '')
    .replace(/\s+/g, ' ')
    .matchAll(/\b(nccl[A-Z]\w*|cuda[A-Z]\w*) ?\(([^()]*)\) ?;/g)
  return new Map([...declarations].map(([, name, text]) => [name as string, argumentsOf(text as string)]))
}

function argumentsOf(text: string): string[] {
  const list = text.trim() === 'void' ? '' : text.trim()
  return list === '' ? [] : list.split(',').map(kindOf)
}

/** Handles are pointers, and enums are as wide as an int. */
function kindOf(argument: string): string {
  const text = argument.trim()
  if (text.includes('*') || /\b(ncclComm_t|cudaStream_t|cudaEvent_t)\b/.test(text)) return 'void *'
  if (/\bncclUniqueId\b/.test(text)) return UNIQUE_ID
  if (/\bsize_t\b/.test(text)) return 'size_t'
  if (/\bunsigned int\b/.test(text)) return 'unsigned int'
  if (/\b(int|ncclDataType_t|ncclRedOp_t|ncclResult_t|cudaError_t|enum cudaMemcpyKind)\b/.test(text)) return 'int'
  return text
}

describe('the comparison with a header', () => {
  test('reads declarations, and tells one argument from another', () => {
    const header = 'ncclResult_t ncclBroadcast(const void* a, size_t n, ncclDataType_t t,\n int root, ncclComm_t c); '
    expect(prototypesOf(header).get('ncclBroadcast')).toEqual(['void *', 'size_t', 'int', 'int', 'void *'])
    expect(prototypesOf('extern cudaError_t cudaGetLastError(void);').get('cudaGetLastError')).toEqual([])
  })
})

describe.skipIf(!hasLibraries)('the real libraries', () => {
  let cuda: CudaRuntime
  let nccl: Nccl
  beforeAll(async () => {
    const paths = { site: SITE as string }
    cuda = await CudaRuntime.load(paths, {})
    nccl = await Nccl.load(paths, {})
  })

  test('are found in the folder, and tell their versions', () => {
    expect(nccl.from).toBe(join(SITE as string, 'nvidia/nccl/lib/libnccl.so.2'))
    expect(nccl.version).toBeGreaterThanOrEqual(21_400)
    expect(cuda.runtimeVersion()).toBeGreaterThanOrEqual(12_000)
  })

  test('an identifier has 128 bytes and is another one each time', () => {
    const [first, second] = [nccl.createUniqueId(), nccl.createUniqueId()]
    expect(first).toHaveLength(128)
    expect(first.some((byte) => byte !== 0)).toBe(true)
    expect(first).not.toEqual(second)
  })

  test('every function of NCCL is called as nccl.h declares it', () => {
    const declared = prototypesOf(headerOf(nccl.from, 'nccl.h'))
    for (const [name, types] of Object.entries(NCCL_PROTOTYPES))
      expect([name, declared.get(name)]).toEqual([name, types])
    for (const name of NCCL_THREADED) expect([name, declared.get(name)]).toEqual([name, ['void *']])
  })

  test('the configuration starts with the fields of nccl.h, in order', () => {
    const [, body = ''] =
      /typedef struct ncclConfig_v\d+ \{([\s\S]*?)\} ncclConfig_t;/.exec(headerOf(nccl.from, 'nccl.h')) ?? []
    const fields = [...body.replace(/\/\*[\s\S]*?\*\//g, '').matchAll(/([\w ]+[ *])(\w+);/g)].map(([, type, name]) => [
      name,
      type?.includes('*') ? 'pointer' : type?.trim(),
    ])
    const header = [
      ['size', 'size_t'],
      ['magic', 'unsigned int'],
      ['version', 'unsigned int'],
    ]
    const known = [...header, ...CONFIG_FIELDS]
    expect(fields.length).toBeGreaterThan(header.length)
    expect(known.slice(0, fields.length)).toEqual(fields.slice(0, known.length))
  })

  test.skipIf(!existsSync(runtimeHeader()))(
    'every function of CUDA is called as cuda_runtime_api.h declares it',
    () => {
      const declared = prototypesOf(readFileSync(runtimeHeader(), 'utf8'))
      const functions = Object.entries(CUDA_PROTOTYPES)
      for (const [name, types] of functions) expect([name, declared.get(name)]).toEqual([name, types])
    },
  )

  test('without a driver or a GPU, joining says so with the words of CUDA', async () => {
    let count = 0
    try {
      count = cuda.deviceCount()
    } catch {
      // what is tested below
    }
    if (count > 0) return // a machine with a GPU: `pnpm test:gpu`
    const place = { rank: 0, localRank: 0, worldSize: 1, localWorldSize: 1 }
    const rendezvous = { ...place, masterAddr: '127.0.0.1', masterPort: 1, timeoutMs: 5_000 }
    const options = { store: new MemoryStore(), libraries: { site: SITE as string } }
    const error = await ncclCollectives(rendezvous, options).catch((error) => error)
    expect(error).toMatchObject({ code: 'CUDA_UNAVAILABLE', where: 'cudaGetDeviceCount' })
    expect(error.actual.error).toMatch(
      /^(cudaErrorInsufficientDriver \(35\): CUDA driver version is insufficient for CUDA runtime version|cudaErrorNoDevice \(100\): no CUDA-capable device is detected)$/,
    )
    expect(error.actual.runtime).toMatch(/^1[2-9]\.\d+$/)
  })

  test('an error of NCCL carries the text of its kind and what NCCL said last', () => {
    let error: unknown
    try {
      nccl.isReady(0n)
    } catch (caught) {
      error = caught
    }
    expect(error).toMatchObject({ code: 'NCCL_ERROR', actual: { result: 4 } })
    expect((error as Error).message).toMatch(/ncclCommGetAsyncError failed[\s\S]*invalid argument/)
  })

  test('versions read as NVIDIA writes them', () => {
    expect(ncclVersionText(23_007)).toBe('2.30.7')
    expect(ncclVersionText(21_400)).toBe('2.14.0')
  })

  function headerOf(library: string, name: string): string {
    return readFileSync(join(dirname(library), '../include', name), 'utf8')
  }
})

function runtimeHeader(): string {
  return join(SITE ?? '', 'nvidia/cu13/include/cuda_runtime_api.h')
}

import { RankwiseError } from '@rankwise/core'
import type { Engine, EngineName } from './engine.ts'
import { loadAddon } from './native/addon.ts'
import { bfloat16Problem } from './native/bfloat16-check.ts'
import type { TfjsBinding } from './native/binding.ts'
import { hasFastBfloat16 } from './native/fast-bfloat16.ts'
import { NativeEngine } from './native/native-engine.ts'
import { defaultThreads } from './threads.ts'
import { WasmEngine } from './wasm/wasm-engine.ts'
import { WasmRuntime } from './wasm/wasm-runtime.ts'

/**
 * As torch's `set_float32_matmul_precision`: `'medium'` keeps weights that are stored in bfloat16 so, and may multiply in it.
 */
export type MatmulPrecision = 'highest' | 'medium'

/** What computes, and how it came to that. */
export interface EngineSelection {
  readonly engine: EngineName
  /** Which native library: the package or `build-tfjs-native`. @default for wasm, none */
  readonly origin?: string
  readonly float32MatmulPrecision: MatmulPrecision
  /** Whether bfloat16 weights are multiplied in bfloat16; else they are cast to float32, a piece at a time. */
  readonly multipliesBfloat16: boolean
  /** What `'auto'` would have preferred, and why it could not be. */
  readonly rejected: readonly { readonly engine: EngineName; readonly reason: string }[]
}

/** What an engine is made from. */
export interface EngineRequest {
  readonly threads: number | undefined
  readonly float32MatmulPrecision: MatmulPrecision
}

/** An engine, and how it was chosen. */
export interface SelectedEngine {
  readonly engine: Engine
  readonly selection: EngineSelection
}

type Candidate = Omit<EngineSelection, 'rejected' | 'multipliesBfloat16'> & { readonly instance: Engine }

/** From the fastest to the one that is always there. */
const PREFERENCE: readonly EngineName[] = ['native-gpu', 'native', 'wasm']

/** The fastest engine that there is. @throws RankwiseError `TFJS_ENGINE` when there is none */
export async function selectEngine(request: EngineRequest): Promise<SelectedEngine> {
  const rejected: { engine: EngineName; reason: string }[] = []
  for (const name of PREFERENCE) {
    try {
      return selected(await createEngine(name, request), rejected)
    } catch (error) {
      if (!(error instanceof RankwiseError)) throw error
      rejected.push({ engine: name, reason: error.message })
    }
  }
  throw new RankwiseError('TFJS_ENGINE', 'no engine of TensorFlow.js can be used', {
    actual: { rejected: rejected.map(({ engine, reason }) => `${engine}: ${reason}`) },
  })
}

/** The engine that was asked for, and no other. @throws RankwiseError `TFJS_ENGINE`, `BACKEND_THREADS`, `RENDEZVOUS_ENV` */
export async function requireEngine(name: EngineName, request: EngineRequest): Promise<SelectedEngine> {
  return selected(await createEngine(name, request), [])
}

function selected({ instance, ...selection }: Candidate, rejected: EngineSelection['rejected']): SelectedEngine {
  const { multipliesBfloat16 } = instance
  return { engine: instance, selection: { ...selection, multipliesBfloat16, rejected } }
}

async function createEngine(name: EngineName, request: EngineRequest): Promise<Candidate> {
  if (name === 'wasm') return createWasm(request)
  return createNative(name, request)
}

async function createWasm({ threads = 1, float32MatmulPrecision }: EngineRequest): Promise<Candidate> {
  if (threads !== 1) {
    throw new RankwiseError('BACKEND_THREADS', 'WebAssembly computes on one thread', {
      actual: { threads },
      rule: 'in Node, TensorFlow.js starts no threads of WebAssembly',
      remedy: 'use more ranks, or the native engine',
    })
  }
  if (float32MatmulPrecision !== 'highest') warnOfFloat32('WebAssembly has no bfloat16')
  const instance = new WasmEngine(await WasmRuntime.load())
  return { instance, engine: 'wasm', float32MatmulPrecision: 'highest' }
}

function createNative(name: 'native' | 'native-gpu', request: EngineRequest): Candidate {
  const { threads = defaultThreads(), float32MatmulPrecision } = request
  const { binding, origin } = loadAddon(threads)
  if (binding.isUsingGpuDevice() !== (name === 'native-gpu')) {
    throw new RankwiseError('TFJS_ENGINE', `TensorFlow uses ${name === 'native' ? 'a' : 'no'} GPU`, {
      where: origin,
      rule: 'TensorFlow uses a GPU where its library is made for one and finds one',
      remedy:
        name === 'native' ? 'set CUDA_VISIBLE_DEVICES=-1 for the CPU' : 'install @tensorflow/tfjs-node-gpu and CUDA',
    })
  }
  const float32 = withoutBfloat16(binding, threads)
  if (float32MatmulPrecision === 'highest') return { instance: float32, engine: name, origin, float32MatmulPrecision }
  const isFast = name === 'native-gpu' || hasFastBfloat16()
  const bfloat16 = new NativeEngine(binding, { threads, bfloat16: isFast ? 'multiplied' : 'stored' })
  const problem = bfloat16Problem(bfloat16)
  if (problem === undefined) return { instance: bfloat16, engine: name, origin, float32MatmulPrecision }
  warnOfFloat32(problem)
  return { instance: float32, engine: name, origin, float32MatmulPrecision: 'highest' }
}

/** An engine that keeps weights in float32, to compute in it. */
function withoutBfloat16(binding: TfjsBinding, threads: number): NativeEngine {
  const engine = new NativeEngine(binding, { threads, bfloat16: 'cast' })
  return bfloat16Problem(engine) === undefined ? engine : new NativeEngine(binding, { threads, bfloat16: 'none' })
}

function warnOfFloat32(reason: string): void {
  process.emitWarning(`tfjs: weights are cast to float32 and multiplied in float32: ${reason}`, {
    code: 'TFJS_BFLOAT16',
  })
}

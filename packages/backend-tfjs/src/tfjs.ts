import { RankwiseError } from '@rankwise/core'
import { TfjsBackend } from './backend.ts'
import type { EngineName } from './engine.ts'
import { type MatmulPrecision, requireEngine, selectEngine } from './engine-selection.ts'
import { checkThreads } from './threads.ts'

const ENGINES: readonly (EngineName | 'auto')[] = ['auto', 'native-gpu', 'native', 'wasm']
const PRECISIONS: readonly MatmulPrecision[] = ['highest', 'medium']

/** Options of `tfjs`. */
export interface TfjsOptions {
  /**
   * What computes. `'native-gpu'` and `'native'`: TensorFlow's library, which `@tensorflow/tfjs-node-gpu` or
   * `@tensorflow/tfjs-node` brings, or the build script of Rankwise. `'wasm'`: WebAssembly, which is always there.
   * `'auto'`: the first of these that can be used; `backend.selection` says which, and why not those before it. Any other
   * choice is that or an error.
   *
   * @default 'auto'
   */
  readonly engine?: EngineName | 'auto' | undefined
  /**
   * Threads that one operation runs on: fixed in a process once the native engine was used, and 1 for `'wasm'`.
   *
   * @default native: `max(1, floor(cores / LOCAL_WORLD_SIZE))`, so that the ranks on this machine do not share cores
   */
  readonly threads?: number | undefined
  /**
   * As torch's `set_float32_matmul_precision`. `'highest'`: everything in float32, weights are cast when they are loaded.
   * `'medium'`: matrices that a file stores in bfloat16 stay so, which takes half the memory. GPUs and CPUs with AMX multiply
   * them so, with inputs rounded to it; elsewhere that is slower, and they are cast to float32 where they are used. Where
   * none of this works, a warning says so and everything is float32.
   *
   * @default 'highest'
   */
  readonly float32MatmulPrecision?: MatmulPrecision | undefined
}

/**
 * The backend on TensorFlow.js.
 *
 * @throws RankwiseError `BACKEND_ENGINE`, `BACKEND_PRECISION`, `BACKEND_THREADS`, `RENDEZVOUS_ENV`; `TFJS_ENGINE` when the
 *   engine cannot be used
 */
export async function tfjs(options: TfjsOptions = {}): Promise<TfjsBackend> {
  const { engine: name = 'auto', threads, float32MatmulPrecision = 'highest' } = options
  requireOneOf('BACKEND_ENGINE', 'engine', name, ENGINES)
  requireOneOf('BACKEND_PRECISION', 'float32MatmulPrecision', float32MatmulPrecision, PRECISIONS)
  const request = { threads: threads === undefined ? undefined : checkThreads(threads), float32MatmulPrecision }
  const { engine, selection } = await (name === 'auto' ? selectEngine(request) : requireEngine(name, request))
  return new TfjsBackend(engine, selection)
}

function requireOneOf(code: string, option: string, value: string, known: readonly string[]): void {
  if (known.includes(value)) return
  throw new RankwiseError(code, `the backend tfjs has no such ${option}`, {
    actual: { [option]: value },
    rule: `${option} is one of ${known.join(', ')}`,
  })
}

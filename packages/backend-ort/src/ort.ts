import { RankwiseError } from '@rankwise/core'
import { OrtBackend } from './backend.ts'
import { ENGINE_VARIABLE, type EngineChoice, selectEngine } from './engine/engine-selection.ts'
import { checkThreads, defaultThreads } from './threads.ts'
import { WeightLoader, type WeightsMode } from './weight-loader.ts'

/** Options of `ort`. */
export interface OrtOptions {
  /** Where it computes. */
  readonly device: 'cpu'
  /**
   * What calls ONNX Runtime. `'capi'`: our addon, through the C API of the library that onnxruntime-node ships: the event
   * loop goes on while it computes, results are not copied, and steps reuse the memory of earlier ones. `'binding'`: the
   * Node.js binding of onnxruntime-node, wherever that is there. `'auto'`: the first of these that can be used;
   * `backend.selection` says which, and why not the other. Any other choice is that or an error.
   *
   * @default the environment variable `RANKWISE_ORT_ENGINE`, else 'auto'
   */
  readonly engine?: EngineChoice | undefined
  /**
   * Threads that one operation runs on. On the engine `'capi'`, the backends of a process that have as many threads as its
   * first one share them; others have threads for every segment.
   *
   * @default `max(1, floor(cores / LOCAL_WORLD_SIZE))`, so that the ranks on this machine do not share cores
   */
  readonly threads?: number | undefined
  /**
   * Keeps every thread on a processor of its own, other ones for every rank on this machine. Only on Linux, on the engine
   * `'capi'`.
   *
   * @default false
   */
  readonly pinThreads?: boolean | undefined
  /**
   * Where weights lie. `'mapped'`: in their file, which the ranks of a machine share and which costs no memory of a
   * process; what is not consecutive in a file (the columns of a row-wise weight) is read. `'read'`: in memory of the
   * process. `'auto'`: mapped where that is possible, and read elsewhere; `memory()` says how much is which. While a
   * file is mapped it may be renamed or deleted, but not truncated or written to.
   *
   * @default 'auto'
   */
  readonly weights?: WeightsMode | undefined
}

/**
 * The backend on ONNX Runtime.
 *
 * @throws RankwiseError `BACKEND_DEVICE`, `BACKEND_ENGINE`, `BACKEND_THREADS`, `BACKEND_PINNING`, `BACKEND_WEIGHTS`,
 *   `RENDEZVOUS_ENV`; `BACKEND_MAPPING` when weights must be mapped and nothing can be mapped here, `ORT_ENGINE` when the
 *   engine is to be 'capi' and that cannot be used
 */
export async function ort(options: OrtOptions): Promise<OrtBackend> {
  const { device, threads = defaultThreads(), pinThreads = false, weights = 'auto' } = options
  const { engine = process.env[ENGINE_VARIABLE] || 'auto' } = options
  if (device !== 'cpu') {
    throw new RankwiseError('BACKEND_DEVICE', 'the backend ort cannot compute there', {
      actual: { device },
      rule: "device is 'cpu'",
    })
  }
  const loader = await WeightLoader.create(weights)
  return new OrtBackend(await selectEngine(engine, { threads: checkThreads(threads), pinThreads }), loader)
}

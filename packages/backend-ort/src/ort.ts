import { RankwiseError } from '@rankwise/core'
import { OrtBackend } from './backend.ts'
import { checkThreads, defaultThreads } from './threads.ts'
import { WeightLoader, type WeightsMode } from './weight-loader.ts'

/** Options of `ort`. */
export interface OrtOptions {
  /** Where it computes. */
  readonly device: 'cpu'
  /**
   * Threads that one operation runs on.
   *
   * @default `max(1, floor(cores / LOCAL_WORLD_SIZE))`, so that the ranks on this machine do not share cores
   */
  readonly threads?: number | undefined
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
 * @throws RankwiseError `BACKEND_DEVICE`, `BACKEND_THREADS`, `BACKEND_WEIGHTS`, `RENDEZVOUS_ENV`; `BACKEND_MAPPING` when
 *   weights must be mapped and nothing can be mapped here
 */
export async function ort({ device, threads = defaultThreads(), weights = 'auto' }: OrtOptions): Promise<OrtBackend> {
  if (device !== 'cpu') {
    throw new RankwiseError('BACKEND_DEVICE', 'the backend ort cannot compute there', {
      actual: { device },
      rule: "device is 'cpu'",
    })
  }
  return new OrtBackend({ threads: checkThreads(threads) }, await WeightLoader.create(weights))
}

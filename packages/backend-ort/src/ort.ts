import { RankwiseError } from '@rankwise/core'
import { OrtBackend } from './backend.ts'
import { checkThreads, defaultThreads } from './threads.ts'

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
}

/**
 * The backend on ONNX Runtime.
 *
 * @throws RankwiseError `BACKEND_DEVICE`, `BACKEND_THREADS`, `RENDEZVOUS_ENV`
 */
export async function ort({ device, threads = defaultThreads() }: OrtOptions): Promise<OrtBackend> {
  if (device !== 'cpu') {
    throw new RankwiseError('BACKEND_DEVICE', 'the backend ort cannot compute there', {
      actual: { device },
      rule: "device is 'cpu'",
    })
  }
  return new OrtBackend({ threads: checkThreads(threads) })
}

import type { LoadProgress } from '../load-weights.ts'
import type { Environment } from '../rendezvous.ts'

/** How far a download has come; the bytes are those of the files that were asked for, cached ones included. */
export interface DownloadProgress extends LoadProgress {
  /** Files that are complete. */
  readonly loadedFiles: number
  readonly totalFiles: number
}

/** How often a request that failed is tried again. An attempt that brought bytes along starts the count anew. */
export interface RetryPolicy {
  /** Attempts in a row that may fail. @default 6 */
  readonly attempts: number
  /** Wait before the second attempt, in milliseconds; it doubles with every further one. @default 500 */
  readonly delayMs: number
  /** Longest wait, in milliseconds, be it asked for by the server with `Retry-After`. @default 60000 */
  readonly maxDelayMs: number
}

/** Where a model on a hub is looked for, and how it is fetched. The variables of `huggingface_hub` give the defaults. */
export interface HubOptions {
  /** Branch, tag or commit. @default 'main' */
  readonly revision?: string | undefined
  /**
   * Access token; `false` sends none.
   *
   * @default HF_TOKEN, or the file that `hf auth login` wrote: HF_TOKEN_PATH, $HF_HOME/token
   */
  readonly token?: string | false | undefined
  /** Folder of the cache, laid out as Python's `huggingface_hub` does. @default HF_HUB_CACHE, or $HF_HOME/hub */
  readonly cacheDir?: string | undefined
  /** Uses the cache alone and sends nothing. @default HF_HUB_OFFLINE */
  readonly localFilesOnly?: boolean | undefined
  /** Address of the hub. @default HF_ENDPOINT, or 'https://huggingface.co' */
  readonly endpoint?: string | undefined
  /**
   * Longest wait for an answer, or for 16 KiB of it, in milliseconds.
   *
   * @default HF_HUB_DOWNLOAD_TIMEOUT (seconds), or 10000
   */
  readonly timeoutMs?: number | undefined
  readonly retry?: Partial<RetryPolicy> | undefined
  /** Where the variables are read from. @default process.env */
  readonly env?: Environment | undefined
  /** Aborts with `ABORTED`; what was downloaded so far is resumed by the next call. */
  readonly signal?: AbortSignal | undefined
}

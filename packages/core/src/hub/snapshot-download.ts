import { downloadBlob } from './blob-download.ts'
import type { HubCache } from './hub-cache.ts'
import type { DownloadProgress } from './hub-options.ts'
import { inParallel } from './parallel.ts'
import type { HubFile, RangedFile } from './remote-file.ts'

/** What `downloadFiles` needs to know beside the files. */
export interface SnapshotDownloadOptions {
  readonly repo: string
  readonly commit: string
  readonly cache: HubCache
  /** Opens a file on the hub. */
  readonly remote: (file: HubFile) => RangedFile
  readonly signal?: AbortSignal | undefined
  readonly onProgress?: ((progress: DownloadProgress) => void) | undefined
}

/** Files that are downloaded at once: one connection seldom fills a fast line. */
const PARALLEL_FILES = 4

const PROGRESS_INTERVAL_MS = 100

/**
 * Brings files into a snapshot, in their order.
 *
 * @throws RankwiseError as `downloadBlob`
 */
export async function downloadFiles(files: readonly HubFile[], options: SnapshotDownloadOptions): Promise<void> {
  const { repo, commit, cache, remote, onProgress } = options
  const progress = new ProgressReport(repo, files, onProgress)
  const bring = async (file: HubFile, signal: AbortSignal) => {
    if (!(await cache.has(commit, file))) {
      await downloadBlob(remote(file), cache, { repo, signal, onBytes: (bytes) => progress.update(file, bytes) })
      await cache.link(commit, file)
    }
    progress.complete(file)
  }
  await inParallel(files, bring, { limit: PARALLEL_FILES, signal: options.signal })
}

/** Sums the progress of files, and tells it at a pace that a terminal can follow. */
class ProgressReport {
  readonly #component: string
  readonly #totalFiles: number
  readonly #totalBytes: number
  readonly #onProgress: ((progress: DownloadProgress) => void) | undefined
  readonly #loaded = new Map<string, number>()
  #loadedFiles = 0
  #toldAt = Number.NEGATIVE_INFINITY

  constructor(repo: string, files: readonly HubFile[], onProgress: ((progress: DownloadProgress) => void) | undefined) {
    this.#component = repo
    this.#totalFiles = files.length
    this.#totalBytes = files.reduce((sum, { size }) => sum + size, 0)
    this.#onProgress = onProgress
  }

  update({ path }: HubFile, bytes: number): void {
    this.#loaded.set(path, bytes)
    if (performance.now() - this.#toldAt >= PROGRESS_INTERVAL_MS) this.#tell()
  }

  complete({ path, size }: HubFile): void {
    this.#loaded.set(path, size)
    this.#loadedFiles++
    this.#tell()
  }

  #tell(): void {
    this.#toldAt = performance.now()
    this.#onProgress?.({
      component: this.#component,
      loadedBytes: [...this.#loaded.values()].reduce((sum, bytes) => sum + bytes, 0),
      totalBytes: this.#totalBytes,
      loadedFiles: this.#loadedFiles,
      totalFiles: this.#totalFiles,
    })
  }
}

import { chooseWeights } from '../checkpoint/checkpoint-files.ts'
import { refuseForeignCheckpoint } from '../checkpoint/foreign-checkpoint.ts'
import { RankwiseError } from '../errors.ts'
import { listSnapshot } from './cached-listing.ts'
import { type FileListing, listRepository, resolveCommit } from './file-listing.ts'
import {
  type FileSelection,
  folderOf,
  isIndex,
  missingFrom,
  pathIn,
  selectSmallFiles,
  WEIGHTS_NAMES,
  withoutSlashes,
} from './file-selection.ts'
import { HubCache } from './hub-cache.ts'
import { hubError } from './hub-error.ts'
import type { DownloadProgress, HubOptions } from './hub-options.ts'
import { hubSettings, hubToken } from './hub-settings.ts'
import { HubTransport } from './hub-transport.ts'
import { type HubFile, type RangedFile, RemoteFile } from './remote-file.ts'
import { checkRepoId, checkRevision, isCommit } from './repo-id.ts'
import { downloadFiles } from './snapshot-download.ts'
import { readTree, writeTree } from './tree-cache.ts'
import { findWeightFiles, type WeightFiles, type WeightsPlace } from './weight-files.ts'

/** How `HubRepository.download` downloads. */
export interface DownloadOptions {
  /** @default that of the repository */
  readonly signal?: AbortSignal | undefined
  /** Called up to ten times a second, and when a file is complete. */
  readonly onProgress?: ((progress: DownloadProgress) => void) | undefined
}

interface Source {
  readonly id: string
  readonly revision: string
  readonly commit: string
  readonly listing: FileListing
}

const DEFAULT_REVISION = 'main'

/** A model repository at one commit: what the hub has, and what of it is in the cache. */
export class HubRepository {
  /** `org/name`. */
  readonly id: string
  /** 40 hex digits. As `revision` it names the same content for ever. */
  readonly commit: string
  /** Of the commit; offline, of what the cache knows. */
  readonly files: FileListing
  /** Whether only the cache is used. */
  readonly isOffline: boolean
  readonly #revision: string
  readonly #cache: HubCache
  readonly #transport: HubTransport
  readonly #signal: AbortSignal | undefined
  /** By path: a file remembers where the hub redirects to. */
  readonly #remotes = new Map<string, RemoteFile>()

  private constructor(
    { id, revision, commit, listing }: Source,
    cache: HubCache,
    transport: HubTransport,
    signal?: AbortSignal,
  ) {
    this.id = id
    this.commit = commit
    this.files = listing
    this.isOffline = transport.settings.offline
    this.#revision = revision
    this.#cache = cache
    this.#transport = transport
    this.#signal = signal
  }

  /**
   * Asks the hub for the commit of a revision and for its files; offline, the cache. When the hub cannot be reached and
   * the cache knows the revision, its commit is used, with a warning.
   *
   * @param id `org/name`
   * @throws RankwiseError `HUB_ID_INVALID`, `HUB_REVISION_INVALID`, `HUB_ENDPOINT`, `HUB_TOKEN`, `HUB_OPTION`,
   *   `HUB_NOT_FOUND`, `HUB_UNAUTHORIZED`, `HUB_NETWORK`, `HUB_OFFLINE` when the cache does not know the revision,
   *   `HUB_FILE_NAME`, `HUB_RESPONSE`, `HUB_CACHE`, `ABORTED`
   */
  static async open(id: string, options: HubOptions = {}): Promise<HubRepository> {
    checkRepoId(id)
    const { revision = DEFAULT_REVISION, signal } = options
    checkRevision(id, revision)
    const settings = hubSettings(options)
    const transport = new HubTransport(settings, settings.offline ? undefined : await hubToken(options))
    const cache = new HubCache(settings.cacheDir, id)
    const locate = settings.offline ? locateCached : locateOnline
    const commit = await locate({ id, revision, cache, transport, signal })
    const listing = (await readTree(cache, id, commit)) ?? (await list(id, commit, cache, transport, signal))
    return new HubRepository({ id, revision, commit, listing }, cache, transport, signal)
  }

  /** `org/name@commit`. */
  get location(): string {
    return `${this.id}@${this.commit}`
  }

  /** Folder of the snapshot: what is downloaded is there as a pipeline's folder is laid out. */
  get snapshot(): string {
    return this.#cache.snapshot(this.commit)
  }

  /**
   * Brings files into the cache, unless they are there, and returns the folder of the snapshot. Of several processes
   * one downloads a file, and the others wait for it.
   *
   * @throws RankwiseError `HUB_NOT_FOUND` for files and folders that the repository lacks, `ADAPTERS_UNSUPPORTED`, `HUB_OFFLINE` for files that
   *   are not in the cache, `HUB_DISK_FULL`, `HUB_CACHE`, `HUB_CHANGED`, `HUB_NETWORK`, `HUB_UNAUTHORIZED`,
   *   `HUB_RESPONSE`, `HUB_FILE_NAME`, `CHECKPOINT_INDEX`, `CHECKPOINT_FORMAT`, `ABORTED`
   */
  async download(needed: FileSelection, options: DownloadOptions = {}): Promise<string> {
    const selection = { ...needed, folders: needed.folders?.map(withoutSlashes) ?? [] }
    const missing = missingFrom(this.files, selection)
    if (missing.length > 0) throw this.#lacks(missing)
    const { weights = true } = selection
    const small = selectSmallFiles(this.files, selection)
    // Only with the indices there is a total to report; offline, all that is missing is reported at once.
    const first = this.isOffline ? small : small.filter(isIndex)
    if (weights) await this.#fetch(first, { ...options, onProgress: undefined })
    const files = [...small, ...(weights ? await this.#allWeightFiles(selection) : [])]
    await this.#fetch(files, options)
    return this.snapshot
  }

  /** Those of some files that are not in the snapshot. @throws RankwiseError `HUB_CACHE` */
  async notCached(files: readonly HubFile[]): Promise<readonly HubFile[]> {
    const cached = await Promise.all(files.map((file) => this.#cache.has(this.commit, file)))
    return files.filter((_, i) => cached[i] !== true)
  }

  /** A file on the hub, to be read by ranges and past the cache. @throws RankwiseError `HUB_OFFLINE` */
  remoteFile(file: HubFile): RangedFile {
    if (this.isOffline) throw this.#offline([file.path])
    const known = this.#remotes.get(file.path)
    const remote = known ?? new RemoteFile(this.#transport, { repo: this.id, commit: this.commit, file })
    this.#remotes.set(file.path, remote)
    return remote
  }

  /**
   * The files of a model's weights; brings their index into the cache, if they have one.
   *
   * @throws RankwiseError `CHECKPOINT_NOT_FOUND`, `CHECKPOINT_FORMAT` when the weights are not safetensors, and as
   *   `download`
   */
  async weightFiles(place: WeightsPlace, options: DownloadOptions = {}): Promise<WeightFiles> {
    const { weightsName } = place
    const folder = withoutSlashes(place.folder)
    const { kind, fileName } = chooseWeights(pathIn(this.location, folder), this.#entries(folder), weightsName)
    if (kind === 'index') await this.download({ files: [pathIn(folder, fileName)], weights: false }, options)
    return this.#find({ folder, weightsName })
  }

  /** Names of the files in a folder. */
  #entries(folder: string): readonly string[] {
    const paths = [...this.files.keys()].filter((path) => folderOf(path) === folder)
    return paths.map((path) => path.slice(pathIn(folder, '').length))
  }

  async #find(place: WeightsPlace): Promise<WeightFiles> {
    const found = await findWeightFiles({ repo: this.id, listing: this.files, snapshot: this.snapshot }, place)
    if (found.missing.length > 0) throw this.#lacks(found.missing)
    return found
  }

  async #allWeightFiles({ folders = [], weightsNames = WEIGHTS_NAMES }: FileSelection): Promise<readonly HubFile[]> {
    const places = folders.flatMap((folder) => weightsNames.map((weightsName) => ({ folder, weightsName })))
    const found = await Promise.all(places.map((place) => this.#find(place)))
    return found.flatMap(({ files }) => files)
  }

  async #fetch(files: readonly HubFile[], { signal = this.#signal, onProgress }: DownloadOptions): Promise<void> {
    const absent = await this.notCached(files)
    if (absent.length > 0) {
      if (this.isOffline) throw this.#offline(absent.map(({ path }) => path))
      await this.#cache.requireSpace(absent.reduce((sum, { size }) => sum + size, 0))
    }
    const { id: repo, commit } = this
    const remote = (file: HubFile) => this.remoteFile(file)
    await downloadFiles(files, { repo, commit, cache: this.#cache, remote, signal, onProgress })
    if (!this.isOffline) await this.#noteRevision(absent.length === 0)
  }

  /** A cache that is complete may be one that this process cannot write to. */
  async #noteRevision(isComplete: boolean): Promise<void> {
    try {
      await this.#cache.writeRef(this.#revision, this.commit)
    } catch (error) {
      if (!isComplete) throw error
    }
  }

  #lacks(missing: readonly string[]): RankwiseError {
    if (this.isOffline) return this.#offline(missing)
    const folder = folderOf(missing[0] ?? '')
    refuseForeignCheckpoint(pathIn(this.location, folder), this.#entries(folder))
    return hubError(
      'HUB_NOT_FOUND',
      `the repository lacks ${missing.length} of the files that are needed`,
      { repo: this.id },
      {
        actual: { missing, revision: this.#revision, commit: this.commit },
        remedy: 'check the id, the revision and the subfolder on the web page of the repository',
      },
    )
  }

  #offline(missing: readonly string[]): RankwiseError {
    return notCachedError(this.id, this.#revision, { missing, cache: this.#cache.folder })
  }
}

interface LocateOptions {
  readonly id: string
  readonly revision: string
  readonly cache: HubCache
  readonly transport: HubTransport
  readonly signal: AbortSignal | undefined
}

async function locateCached({ id, revision, cache }: LocateOptions): Promise<string> {
  const commit = isCommit(revision) ? revision : await cache.readRef(revision)
  if (commit !== undefined) return commit
  throw notCachedError(id, revision, { cache: cache.folder })
}

async function locateOnline({ id, revision, cache, transport, signal }: LocateOptions): Promise<string> {
  if (isCommit(revision)) return revision
  const cached = await cache.readRef(revision)
  try {
    return await resolveCommit(transport, id, revision, { signal, isLastResort: cached === undefined })
  } catch (error) {
    if (cached === undefined || !(error instanceof RankwiseError) || error.code !== 'HUB_NETWORK') throw error
    process.emitWarning(`${id}: the hub cannot be reached; using commit ${cached} from the cache for ${revision}`, {
      code: 'HUB_UNREACHABLE',
      detail: error.message,
    })
    return cached
  }
}

async function list(
  id: string,
  commit: string,
  cache: HubCache,
  transport: HubTransport,
  signal: AbortSignal | undefined,
): Promise<FileListing> {
  if (transport.settings.offline) return listSnapshot(cache.snapshot(commit))
  const listing = await listRepository(transport, id, commit, signal)
  // Without it the next load asks the hub again: no reason to fail where the cache cannot be written.
  await writeTree(cache, commit, listing).catch(() => undefined)
  return listing
}

function notCachedError(repo: string, revision: string, actual: Readonly<Record<string, unknown>>): RankwiseError {
  return hubError(
    'HUB_OFFLINE',
    'the cache lacks what is needed, and the hub is not to be asked',
    { repo },
    {
      actual: { revision, ...actual },
      rule: 'with localFilesOnly or HF_HUB_OFFLINE only files in the cache are used',
      remedy: 'load once with access to the hub, or drop localFilesOnly and HF_HUB_OFFLINE',
    },
  )
}

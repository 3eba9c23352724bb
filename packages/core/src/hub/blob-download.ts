import { createHash, type Hash } from 'node:crypto'
import { constants, type FileHandle, mkdir, open, readdir, rename, rm, stat } from 'node:fs/promises'
import { basename, dirname, join } from 'node:path'
import { throwIfAborted } from '../abort.ts'
import { RankwiseError } from '../errors.ts'
import { FileLock } from './file-lock.ts'
import { type HubCache, syncFolder, temporaryName } from './hub-cache.ts'
import { cacheError, hubError } from './hub-error.ts'
import type { HubFile, RangedFile } from './remote-file.ts'

/** How a content is downloaded. */
export interface BlobDownloadOptions {
  readonly repo: string
  readonly signal?: AbortSignal | undefined
  /** Called with the bytes of the file that are there by now. */
  readonly onBytes?: ((bytes: number) => void) | undefined
}

/** Unlike that of `huggingface_hub`, whose own files are not to be touched. */
const SUFFIX = 'rankwise.incomplete'

const READ_BYTES = 1024 * 1024

/** Errors after which the next download may go on with what is there. */
const RESUMABLE: ReadonlySet<string> = new Set([
  'ABORTED',
  'HUB_NETWORK',
  'HUB_NOT_FOUND',
  'HUB_RESPONSE',
  'HUB_UNAUTHORIZED',
])

/**
 * Brings the content of a file into the cache, unless it is there. Of several processes one downloads and the others
 * wait for it. It writes to a file of its own, which takes its place once its hash is that of the listing; what an
 * interrupted download leaves is taken up by the next.
 *
 * @throws RankwiseError `HUB_CACHE`, `HUB_DISK_FULL`, `HUB_CHANGED` when the content is not what the hub lists, and as
 *   `RangedFile.read`
 */
export async function downloadBlob(remote: RangedFile, cache: HubCache, options: BlobDownloadOptions): Promise<void> {
  const { file } = remote
  if (await cache.hasBlob(file)) return
  await using lock = await FileLock.acquire(join(cache.lockFolder, `${file.oid}.rankwise.lock`), options)
  if (await cache.hasBlob(file)) return
  const blob = cache.blob(file)
  const temporary = temporaryName(blob, SUFFIX)
  try {
    await mkdir(dirname(blob), { recursive: true })
    if (!lock.isTakenFromSilence) await adoptLeftover(blob, temporary)
    await fillVerified(temporary, remote, options)
    await rename(temporary, blob)
    await syncFolder(dirname(blob))
  } catch (error) {
    if (!(error instanceof RankwiseError) || !RESUMABLE.has(error.code)) await rm(temporary, { force: true })
    // One that slept through its lock finds that another has done the work.
    if (await cache.hasBlob(file)) return
    throw cacheError(error, temporary, 'written')
  }
}

/** Gives the largest file that interrupted downloads of this content left a new name, and removes the others. */
async function adoptLeftover(blob: string, temporary: string): Promise<void> {
  const names = (await readdir(dirname(blob))).filter(
    (name) => name.startsWith(`${basename(blob)}.`) && name.endsWith(`.${SUFFIX}`),
  )
  const paths = names.map((name) => join(dirname(blob), name))
  const sizes = await Promise.all(paths.map(async (path) => (await stat(path)).size))
  const largest = sizes.indexOf(Math.max(...sizes))
  for (const [i, path] of paths.entries()) {
    if (i === largest) await rename(path, temporary)
    else await rm(path, { force: true })
  }
}

/** What an earlier process left may never have reached the disk as it was received: then all is loaded again. */
async function fillVerified(path: string, remote: RangedFile, options: BlobDownloadOptions): Promise<void> {
  let result = await fill(path, remote, options)
  if (result.oid !== remote.file.oid && result.startedAt > 0) {
    await rm(path, { force: true })
    result = await fill(path, remote, options)
  }
  if (result.oid === remote.file.oid) return
  throw hubError(
    'HUB_CHANGED',
    'the content is not what the hub lists',
    { repo: options.repo, file: remote.file.path },
    {
      actual: { hash: result.oid, expected: remote.file.oid, bytes: remote.file.size },
      rule: 'a file has the hash that the listing of its commit gives',
      remedy: 'load again; if it persists, the hub or a proxy before it serves wrong files',
    },
  )
}

/** Downloads what a file lacks, and returns the hash of all of it. */
async function fill(path: string, remote: RangedFile, { signal, onBytes }: BlobDownloadOptions) {
  const { file } = remote
  const handle = await open(path, constants.O_RDWR | constants.O_CREAT)
  try {
    if ((await handle.stat()).size > file.size) await handle.truncate(0)
    const hash = contentHash(file)
    const startedAt = await hashStart(handle, hash, signal)
    let position = startedAt
    onBytes?.(position)
    await remote.read(
      { offset: position, length: file.size - position },
      async (bytes) => {
        await writeAll(handle, bytes, position)
        hash.update(bytes)
        position += bytes.length
        onBytes?.(position)
      },
      { requireRanges: false, signal },
    )
    await handle.sync()
    return { oid: hash.digest('hex'), startedAt }
  } finally {
    await handle.close()
  }
}

/** Of a large file the hash is SHA-256; of a small one it is git's, SHA-1 with a header. */
function contentHash({ oid, size }: HubFile): Hash {
  return oid.length === 64 ? createHash('sha256') : createHash('sha1').update(`blob ${size}\0`)
}

/** Hashes what is there; returns how much it is. */
async function hashStart(handle: FileHandle, hash: Hash, signal: AbortSignal | undefined): Promise<number> {
  const buffer = new Uint8Array(READ_BYTES)
  for (let position = 0; ; ) {
    throwIfAborted(signal)
    const { bytesRead } = await handle.read(buffer, 0, READ_BYTES, position)
    if (bytesRead === 0) return position
    hash.update(buffer.subarray(0, bytesRead))
    position += bytesRead
  }
}

async function writeAll(handle: FileHandle, bytes: Uint8Array, position: number): Promise<void> {
  for (let written = 0; written < bytes.length; ) {
    written += (await handle.write(bytes, written, bytes.length - written, position + written)).bytesWritten
  }
}

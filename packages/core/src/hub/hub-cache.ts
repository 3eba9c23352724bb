import { randomBytes } from 'node:crypto'
import { copyFile, mkdir, open, readFile, rename, rm, stat, statfs, symlink, writeFile } from 'node:fs/promises'
import { dirname, join, relative } from 'node:path'
import { RankwiseError } from '../errors.ts'
import { cacheError } from './hub-error.ts'
import type { HubFile } from './remote-file.ts'
import { isCommit } from './repo-id.ts'

/**
 * One repository in the cache, laid out as Python's `huggingface_hub` does (`file_download.py`): contents by their hash
 * in `blobs`, links to them in `snapshots/<commit>`, commits of branches in `refs`, listings in `trees`. Everything
 * appears complete or not at all: it is written beside its place and renamed.
 */
export class HubCache {
  /** `<cache>/models--org--name`. */
  readonly folder: string
  /** `<cache>/.locks/models--org--name`. */
  readonly lockFolder: string

  constructor(cacheDir: string, repo: string) {
    const name = `models--${repo.replace('/', '--')}`
    this.folder = join(cacheDir, name)
    this.lockFolder = join(cacheDir, '.locks', name)
  }

  /** Folder of a snapshot. */
  snapshot(commit: string): string {
    return join(this.folder, 'snapshots', commit)
  }

  /** Path of a file in a snapshot. */
  pointer(commit: string, { path }: Pick<HubFile, 'path'>): string {
    return join(this.snapshot(commit), ...path.split('/'))
  }

  /** Path of a content. */
  blob({ oid }: HubFile): string {
    return join(this.folder, 'blobs', oid)
  }

  /** Path of the listing of a commit. */
  tree(commit: string): string {
    return join(this.folder, 'trees', `${commit}.json`)
  }

  /** The commit that a branch or tag stood for when it was last downloaded. */
  async readRef(revision: string): Promise<string | undefined> {
    const text = await readIfPresent(join(this.folder, 'refs', ...revision.split('/')))
    const commit = text?.trim()
    return commit !== undefined && isCommit(commit) ? commit : undefined
  }

  /** Notes what a branch or tag stands for. @throws RankwiseError `HUB_CACHE`, `HUB_DISK_FULL` */
  async writeRef(revision: string, commit: string): Promise<void> {
    if (revision === commit || (await this.readRef(revision)) === commit) return
    await writeWhole(join(this.folder, 'refs', ...revision.split('/')), commit)
  }

  /** Whether a snapshot has a file, as long as the listing says. */
  async has(commit: string, file: HubFile): Promise<boolean> {
    return (await sizeOfFile(this.pointer(commit, file))) === file.size
  }

  /** Whether the content of a file is there, as long as the listing says. */
  async hasBlob(file: HubFile): Promise<boolean> {
    return (await sizeOfFile(this.blob(file))) === file.size
  }

  /** Puts a file, whose content is there, into a snapshot. @throws RankwiseError `HUB_CACHE`, `HUB_DISK_FULL` */
  async link(commit: string, file: HubFile): Promise<void> {
    const [blob, pointer] = [this.blob(file), this.pointer(commit, file)]
    const temporary = temporaryName(pointer)
    try {
      await mkdir(dirname(pointer), { recursive: true })
      await linkOrCopy(blob, temporary)
      await rename(temporary, pointer)
    } catch (cause) {
      await rm(temporary, { force: true })
      throw cacheError(cause, pointer, 'written')
    }
  }

  /** @throws RankwiseError `HUB_DISK_FULL` when fewer bytes are free; `HUB_CACHE` */
  async requireSpace(bytes: number): Promise<void> {
    if (bytes === 0) return
    let free: number
    try {
      await mkdir(join(this.folder, 'blobs'), { recursive: true })
      const { bavail, bsize } = await statfs(this.folder)
      free = bavail * bsize
    } catch (cause) {
      throw cacheError(cause, this.folder, 'written')
    }
    if (bytes <= free) return
    throw new RankwiseError('HUB_DISK_FULL', 'there is no space for the download', {
      where: this.folder,
      actual: { neededBytes: bytes, freeBytes: free },
      remedy: 'free space, or set cacheDir or HF_HOME to a larger disk',
    })
  }
}

/** A name beside `path` that nothing else has. */
export function temporaryName(path: string, suffix = 'tmp'): string {
  return `${path}.${randomBytes(6).toString('hex')}.${suffix}`
}

/** Writes a small file so that it appears complete. @throws RankwiseError `HUB_CACHE`, `HUB_DISK_FULL` */
export async function writeWhole(path: string, text: string): Promise<void> {
  const temporary = temporaryName(path)
  try {
    await mkdir(dirname(path), { recursive: true })
    await writeFile(temporary, text)
    await rename(temporary, path)
  } catch (cause) {
    await rm(temporary, { force: true })
    throw cacheError(cause, path, 'written')
  }
}

/** The text of a file; undefined when there is none. @throws RankwiseError `HUB_CACHE` */
export async function readIfPresent(path: string): Promise<string | undefined> {
  try {
    return await readFile(path, 'utf8')
  } catch (cause) {
    if (isMissing(cause)) return undefined
    throw cacheError(cause, path, 'read')
  }
}

/** Makes what was renamed in a folder survive a power cut, where the platform can. */
export async function syncFolder(folder: string): Promise<void> {
  try {
    const handle = await open(folder)
    await handle.sync().finally(() => handle.close())
  } catch {
    // Windows opens no folders, and some network file systems do not sync them.
  }
}

/** A relative link, so that the cache can be moved; a copy where links are not to be had. */
async function linkOrCopy(blob: string, path: string): Promise<void> {
  try {
    await symlink(relative(dirname(path), blob), path)
  } catch (error) {
    if (!['EPERM', 'ENOSYS', 'ENOTSUP', 'EOPNOTSUPP'].includes((error as NodeJS.ErrnoException).code ?? '')) throw error
    await copyFile(blob, path)
  }
}

async function sizeOfFile(path: string): Promise<number | undefined> {
  try {
    const stats = await stat(path)
    return stats.isFile() ? stats.size : undefined
  } catch (cause) {
    if (isMissing(cause)) return undefined
    throw cacheError(cause, path, 'read')
  }
}

function isMissing(error: unknown): boolean {
  return ['ENOENT', 'ENOTDIR'].includes((error as NodeJS.ErrnoException).code ?? '')
}

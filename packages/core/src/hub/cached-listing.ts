import { readdir, stat } from 'node:fs/promises'
import { join } from 'node:path'
import type { FileListing } from './file-listing.ts'
import type { HubFile } from './remote-file.ts'

/**
 * The files that a snapshot has, for one that was downloaded without leaving a listing. A file whose content is gone is
 * not there.
 */
export async function listSnapshot(snapshot: string): Promise<FileListing> {
  const entries = await readdir(snapshot, { recursive: true, withFileTypes: true }).catch(() => [])
  const listing = new Map<string, HubFile>()
  for (const { parentPath, name } of entries) {
    const path = join(parentPath, name)
    const stats = await stat(path).catch(() => undefined)
    if (stats?.isFile() !== true) continue
    const relativePath = path.slice(snapshot.length + 1).replaceAll('\\', '/')
    listing.set(relativePath, { path: relativePath, size: stats.size, oid: '', blobId: '' })
  }
  return listing
}

import { z } from 'zod'
import { RankwiseError } from '../errors.ts'
import { type FileListing, listedFile } from './file-listing.ts'
import { type HubCache, readIfPresent, writeWhole } from './hub-cache.ts'

/** The format of `_tree_cache.py` of `huggingface_hub`. A commit's files never change, so neither does this. */
const TREE = z.object({
  format_version: z.literal(1),
  files: z.record(
    z.string(),
    z.object({
      size: z.number(),
      blob_id: z.string(),
      lfs_sha256: z.string().optional(),
      lfs_size: z.number().optional(),
      xet_hash: z.string().optional(),
    }),
  ),
})

/** The listing of a commit that an earlier download left, be it Python's; undefined when there is none that is valid. */
export async function readTree(cache: HubCache, repo: string, commit: string): Promise<FileListing | undefined> {
  const text = await readIfPresent(cache.tree(commit))
  const parsed = TREE.safeParse(parseJson(text))
  if (!parsed.success) return undefined
  try {
    const files = Object.entries(parsed.data.files).map(([path, entry]) => {
      const { size, blob_id: oid, lfs_sha256: sha256, lfs_size: lfsSize = size, xet_hash: xetHash } = entry
      return listedFile(repo, {
        path,
        oid,
        size,
        xetHash,
        ...(sha256 === undefined ? {} : { lfs: { oid: sha256, size: lfsSize } }),
      })
    })
    return new Map(files.map((file) => [file.path, file]))
  } catch (error) {
    if (error instanceof RankwiseError) return undefined
    throw error
  }
}

/** Leaves the listing of a commit for later loads, offline ones among them. @throws RankwiseError `HUB_CACHE`, `HUB_DISK_FULL` */
export async function writeTree(cache: HubCache, commit: string, listing: FileListing): Promise<void> {
  const sorted = [...listing.values()].sort((a, b) => (a.path < b.path ? -1 : 1))
  const files = sorted.map(({ path, size, oid, blobId, xetHash }) => [
    path,
    {
      size,
      blob_id: blobId,
      ...(oid === blobId ? {} : { lfs_sha256: oid, lfs_size: size }),
      ...(xetHash === undefined ? {} : { xet_hash: xetHash }),
    },
  ])
  await writeWhole(
    cache.tree(commit),
    JSON.stringify({ format_version: 1, files: Object.fromEntries(files) }, undefined, 1),
  )
}

function parseJson(text: string | undefined): unknown {
  try {
    return JSON.parse(text ?? 'null')
  } catch {
    return undefined
  }
}

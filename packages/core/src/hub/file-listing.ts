import { RankwiseError } from '../errors.ts'
import { hubError } from './hub-error.ts'
import type { HubTransport } from './hub-transport.ts'
import type { HubFile } from './remote-file.ts'
import { checkFileName, isCommit } from './repo-id.ts'

/** The files of a repository at a commit, by their paths in it. */
export type FileListing = ReadonlyMap<string, HubFile>

/** What the listing of a hub says about one file. */
interface ListedFile {
  readonly path: string
  readonly size: number
  readonly oid?: string | undefined
  readonly lfs?: { readonly oid: string; readonly size: number } | undefined
  readonly xetHash?: string | undefined
}

/** A repository with more files is not a model, or its listing has no end. */
const MAX_FILES = 100_000

/** How `resolveCommit` asks. */
export interface ResolveCommitOptions {
  readonly signal: AbortSignal | undefined
  /** Whether nothing else is left when the hub does not answer; otherwise it is asked once. */
  readonly isLastResort: boolean
}

/**
 * The commit that a branch or tag stands for now.
 *
 * @throws RankwiseError `HUB_NOT_FOUND`, `HUB_UNAUTHORIZED`, `HUB_NETWORK`, `HUB_RESPONSE`, `ABORTED`
 */
export async function resolveCommit(
  transport: HubTransport,
  repo: string,
  revision: string,
  { signal, isLastResort }: ResolveCommitOptions,
): Promise<string> {
  const { modelInfo } = await hubLibrary()
  const { endpoint: hubUrl, retry } = transport.settings
  const policy = isLastResort ? retry : { ...retry, attempts: 1 }
  const info = await understood(repo, () =>
    modelInfo({
      name: repo,
      revision,
      additionalFields: ['sha'],
      hubUrl,
      fetch: transport.apiFetch({ repo }, { signal, policy }),
    }),
  )
  if (typeof info.sha === 'string' && isCommit(info.sha)) return info.sha
  throw hubError(
    'HUB_RESPONSE',
    'the hub names no commit for the revision',
    { repo },
    {
      actual: { revision },
      remedy: 'check HF_ENDPOINT',
    },
  )
}

/**
 * Lists the files of a repository at a commit.
 *
 * @throws RankwiseError `HUB_FILE_NAME`, and as `resolveCommit`
 */
export async function listRepository(
  transport: HubTransport,
  repo: string,
  commit: string,
  signal: AbortSignal | undefined,
): Promise<FileListing> {
  const { listFiles } = await hubLibrary()
  const { endpoint: hubUrl, retry: policy } = transport.settings
  const entries = listFiles({
    repo,
    revision: commit,
    recursive: true,
    hubUrl,
    fetch: transport.apiFetch({ repo }, { signal, policy }),
  })
  return understood(repo, async () => {
    const listing = new Map<string, HubFile>()
    for await (const entry of entries) {
      if (entry.type === 'file') listing.set(entry.path, listedFile(repo, entry))
      if (listing.size > MAX_FILES) throw hubError('HUB_RESPONSE', 'the repository has too many files', { repo })
    }
    return listing
  })
}

/** Checks one entry of a listing. @throws RankwiseError `HUB_FILE_NAME`, `HUB_RESPONSE` */
export function listedFile(repo: string, { path, oid: blobId, size, lfs, xetHash }: ListedFile): HubFile {
  checkFileName(repo, path)
  const content = lfs ?? { oid: blobId, size }
  const isValid =
    isHex(blobId, 40) &&
    isHex(content.oid, lfs === undefined ? 40 : 64) &&
    Number.isSafeInteger(content.size) &&
    content.size >= 0
  if (isValid) {
    return { path, size: content.size, oid: content.oid, blobId, ...(isHex(xetHash, 64) ? { xetHash } : {}) }
  }
  throw hubError(
    'HUB_RESPONSE',
    'the listing says nothing sensible about the file',
    { repo, file: path },
    {
      rule: 'a file has a size, and a hash of 40 or 64 hex digits',
    },
  )
}

function isHex(value: unknown, digits: number): value is string {
  return typeof value === 'string' && value.length === digits && /^[0-9a-f]+$/.test(value)
}

/** Loaded on demand: importing it takes 0.1 s, and models in local folders need none of it. */
function hubLibrary() {
  return import('@huggingface/hub')
}

/** Runs a call of the library. What is not our own error is about an answer that it could not make sense of. */
async function understood<T>(repo: string, call: () => Promise<T>): Promise<T> {
  try {
    return await call()
  } catch (error) {
    if (error instanceof RankwiseError) throw error
    throw hubError(
      'HUB_RESPONSE',
      'the hub sends an answer that makes no sense',
      { repo },
      {
        actual: { problem: (error as Error).name },
        remedy: 'check HF_ENDPOINT',
      },
    )
  }
}

import { stat } from 'node:fs/promises'
import { isAbsolute } from 'node:path'
import { quoteName } from '../checkpoint/strict-json.ts'
import { RankwiseError } from '../errors.ts'
import { hubError } from './hub-error.ts'

/** Longest id, as `validate_repo_id` of huggingface_hub has it. */
const MAX_ID_LENGTH = 96

const COMMIT = /^[0-9a-f]{40}$/

/** Whether a revision is a commit, so that what it names never changes. */
export function isCommit(revision: string): boolean {
  return COMMIT.test(revision)
}

/**
 * Whether `pathOrId` is the id of a repository on a hub. A folder or file that exists is a path, and so is everything
 * that can only be one; the loader says what is wrong with it.
 *
 * @throws RankwiseError `HUB_ID_INVALID` when it is neither
 */
export async function isRepoId(pathOrId: string): Promise<boolean> {
  if (isAbsolute(pathOrId) || /^\.{1,2}([/\\]|$)/.test(pathOrId) || (await exists(pathOrId))) return false
  checkRepoId(pathOrId)
  return true
}

/**
 * Ids as the hub allows them: `org/name`, each of letters, digits, `-`, `_` and `.`, without `--` and `..`.
 *
 * @throws RankwiseError `HUB_ID_INVALID`
 */
export function checkRepoId(id: string): void {
  const parts = id.split('/')
  const valid = parts.length === 2 && parts.every((part) => /^[A-Za-z0-9_]([\w.-]*\w)?$/.test(part))
  if (valid && id.length <= MAX_ID_LENGTH && !/--|\.\./.test(id) && !id.endsWith('.git')) return
  throw new RankwiseError('HUB_ID_INVALID', 'this is neither an existing folder nor the id of a repository', {
    where: quoteName(id),
    rule: `an id is org/name, of letters, digits, -, _ and ., without -- and .., at most ${MAX_ID_LENGTH} characters`,
    remedy: 'check the spelling; start a path with / or ./',
  })
}

/** A revision becomes part of addresses and of a file name. @throws RankwiseError `HUB_REVISION_INVALID` */
export function checkRevision(repo: string, revision: string): void {
  const parts = revision.split('/')
  if (parts.every((part) => /^[\w.+@#=,-]+$/.test(part) && !/^\.|\.\.|\.lock$/.test(part))) return
  throw hubError(
    'HUB_REVISION_INVALID',
    'this is no revision',
    { repo },
    {
      actual: { revision: quoteName(revision) },
      rule: 'a revision is a branch, a tag, a commit of 40 hex digits or refs/pr/N',
    },
  )
}

/**
 * Names of files come from the server and become paths of this machine.
 *
 * @throws RankwiseError `HUB_FILE_NAME` for a name that could leave the folder of the snapshot on any platform
 */
export function checkFileName(repo: string, name: unknown): asserts name is string {
  if (typeof name === 'string' && isSafePath(name)) return
  throw hubError(
    'HUB_FILE_NAME',
    'the repository has a file with an unsafe name',
    { repo },
    {
      actual: { name: quoteName(String(name)) },
      rule: 'names are relative, without .. and control characters, also when read as a path of Windows',
      remedy: 'do not use this repository, or ask its owner to rename the file',
    },
  )
}

function isSafePath(name: string): boolean {
  if (/[\\\p{Cc}]/u.test(name) || name.length > 1024) return false
  return name.split('/').every((part) => part !== '' && part !== '.' && part !== '..' && !/^[A-Za-z]:/.test(part))
}

async function exists(path: string): Promise<boolean> {
  return stat(path).then(
    () => true,
    () => false,
  )
}

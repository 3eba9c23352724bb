import { quoteName } from '../checkpoint/strict-json.ts'
import { RankwiseError, type RankwiseErrorDetails } from '../errors.ts'

/** What an error of the hub is about. */
export interface HubPlace {
  /** `org/name`. */
  readonly repo: string
  /** Within the repository. */
  readonly file?: string | undefined
}

/** How messages name a repository or a file of it. */
export function hubPlace({ repo, file }: HubPlace): string {
  return file === undefined ? repo : `${repo}, file ${quoteName(file)}`
}

/**
 * An error about a repository. Nothing that came over the network is attached as its cause: it could hold the token or
 * a signed address.
 */
export function hubError(
  code: string,
  what: string,
  place: HubPlace,
  details: Omit<RankwiseErrorDetails, 'where'> = {},
): RankwiseError {
  return new RankwiseError(code, what, { ...details, where: hubPlace(place) })
}

/**
 * Turns an error of the file system into a coded one.
 *
 * @param path what was read or written
 * @param action what could not be done, such as 'written'
 */
export function cacheError(cause: unknown, path: string, action: string): RankwiseError {
  if (cause instanceof RankwiseError) return cause
  const { code = '', message } = cause as NodeJS.ErrnoException
  if (code === 'ENOSPC' || code === 'EDQUOT') {
    return new RankwiseError('HUB_DISK_FULL', 'there is no space left for the download', {
      where: path,
      actual: { problem: code },
      remedy: 'free space, or set cacheDir or HF_HOME to a larger disk',
      cause,
    })
  }
  return new RankwiseError('HUB_CACHE', `the cache cannot be ${action}`, {
    where: path,
    actual: { problem: code === '' ? message : code },
    remedy: 'check the permissions of the folder, or set cacheDir or HF_HOME to one of your own',
    cause,
  })
}

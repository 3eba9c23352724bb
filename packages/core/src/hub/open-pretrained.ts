import type { Collectives } from '../collectives.ts'
import { RankwiseError } from '../errors.ts'
import { Tensor } from '../tensor.ts'
import type { HubOptions } from './hub-options.ts'
import { HubRepository } from './hub-repository.ts'
import { isRepoId } from './repo-id.ts'

/** Options of `openPretrained`. */
export interface OpenPretrainedOptions extends HubOptions {
  /** Ranks that load one model: rank 0 names the commit, so that all load the same though the branch moves on. */
  readonly collectives?: Collectives | undefined
}

/**
 * Opens what `fromPretrained` was given: the repository for an id such as `org/name`, undefined for a folder.
 *
 * @throws RankwiseError as `HubRepository.open`; on every rank when rank 0 fails
 */
export async function openPretrained(
  pathOrId: string,
  { collectives, ...options }: OpenPretrainedOptions = {},
): Promise<HubRepository | undefined> {
  if (!(await isRepoId(pathOrId))) return undefined
  if (collectives === undefined || collectives.worldSize === 1) return HubRepository.open(pathOrId, options)
  if (collectives.rank !== 0) {
    const revision = await receiveCommit(pathOrId, collectives, options.signal)
    return HubRepository.open(pathOrId, { ...options, revision })
  }
  return openAndTell(pathOrId, collectives, options)
}

/** What rank 0 tells the others. */
type Announcement = { readonly commit: string } | { readonly code: string; readonly message: string }

/** Bytes of an announcement, which is padded: all ranks have to know its size. */
const ANNOUNCEMENT_BYTES = 2048

/** In JSON, a character takes at most 6 bytes. */
const MAX_MESSAGE_LENGTH = 300

async function openAndTell(id: string, collectives: Collectives, options: HubOptions): Promise<HubRepository> {
  const { signal } = options
  let repository: HubRepository
  try {
    repository = await HubRepository.open(id, options)
  } catch (error) {
    const { code = 'HUB_RESPONSE', message } = error as Partial<RankwiseError> & Error
    // Where this fails as well, the others learn it from the collectives.
    await announce({ code, message: message.slice(0, MAX_MESSAGE_LENGTH) }, collectives, signal).catch(() => undefined)
    throw error
  }
  await announce({ commit: repository.commit }, collectives, signal)
  return repository
}

async function receiveCommit(id: string, collectives: Collectives, signal: AbortSignal | undefined): Promise<string> {
  const tensor = new Tensor('uint8', [ANNOUNCEMENT_BYTES], new Uint8Array(ANNOUNCEMENT_BYTES))
  await collectives.broadcast(tensor, { source: 0, signal })
  const announcement = JSON.parse(new TextDecoder().decode(tensor.data as Uint8Array)) as Announcement
  if ('commit' in announcement) return announcement.commit
  throw new RankwiseError(announcement.code, 'rank 0 could not open the repository', {
    where: id,
    actual: { rank0: announcement.message },
  })
}

async function announce(
  announcement: Announcement,
  collectives: Collectives,
  signal: AbortSignal | undefined,
): Promise<void> {
  const data = new Uint8Array(ANNOUNCEMENT_BYTES).fill(' '.charCodeAt(0))
  new TextEncoder().encodeInto(JSON.stringify(announcement), data)
  await collectives.broadcast(new Tensor('uint8', [ANNOUNCEMENT_BYTES], data), { source: 0, signal })
}

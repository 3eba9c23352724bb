import type { FromFirst } from '../load-agreement.ts'
import type { HubOptions } from './hub-options.ts'
import { HubRepository } from './hub-repository.ts'
import { isRepoId } from './repo-id.ts'

/** Options of `openPretrained`. */
export interface OpenPretrainedOptions extends HubOptions {
  /**
   * That of `loadTogether`, for ranks that load one model: rank 0 names the commit, so that all load the same though the
   * branch moves on. @default this rank alone
   */
  readonly fromFirst?: FromFirst
}

/**
 * Opens what `fromPretrained` was given: the repository for an id such as `org/name`, undefined for a folder.
 *
 * @throws RankwiseError as `HubRepository.open`, and as `FromFirst`
 */
export async function openPretrained(
  pathOrId: string,
  { fromFirst = (work) => work(), ...options }: OpenPretrainedOptions = {},
): Promise<HubRepository | undefined> {
  if (!(await isRepoId(pathOrId))) return undefined
  let opened: HubRepository | undefined
  const revision = await fromFirst(async () => {
    opened = await HubRepository.open(pathOrId, options)
    return opened.commit
  })
  return opened ?? HubRepository.open(pathOrId, { ...options, revision })
}

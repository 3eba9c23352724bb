import { RankwiseError } from '@rankwise/core'
import { closest } from 'fastest-levenshtein'

/**
 * Refuses options that there are not.
 *
 * @throws RankwiseError `OPTION_UNKNOWN` with the known name that is the nearest
 */
export function checkOptionNames(where: string, options: object, known: readonly string[]): void {
  const unknown = Object.keys(options).find((name) => !known.includes(name))
  if (unknown === undefined) return
  throw new RankwiseError('OPTION_UNKNOWN', `there is no option '${unknown}'`, {
    where,
    actual: { known },
    remedy: `the nearest is '${closest(unknown, known)}'`,
  })
}

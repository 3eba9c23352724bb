import { RankwiseError } from '@rankwise/core'
import type { Verdict } from './arena.ts'

/** Why a rank can run no more operations. */
export interface Failure extends Verdict {
  readonly rule?: string
  readonly remedy?: string
  readonly actual?: Readonly<Record<string, unknown>>
  readonly cause?: unknown
}

/** The failure as the error of one operation. */
export function failureError(
  { code, what, ranks, actual, cause, rule, remedy }: Failure,
  where: string,
): RankwiseError {
  return new RankwiseError(code, what, {
    where,
    actual: { ...(ranks.length > 0 ? { ranks } : {}), ...actual },
    ...(rule === undefined ? {} : { rule }),
    ...(remedy === undefined ? {} : { remedy }),
    cause,
  })
}

/** `rank 1`, `ranks 1, 3` */
export function nameRanks(ranks: readonly number[]): string {
  return `${ranks.length === 1 ? 'rank' : 'ranks'} ${ranks.join(', ')}`
}

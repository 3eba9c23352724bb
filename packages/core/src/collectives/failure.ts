import { RankwiseError } from '../errors.ts'

/** Why a rank gave up, as it tells the others. */
export interface Verdict {
  readonly code: string
  readonly what: string
  /** The ranks to blame. */
  readonly ranks: readonly number[]
}

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

/** Ranks that take part in nothing any more. */
export function lost(ranks: readonly number[], what: string, cause?: unknown): Failure {
  return {
    code: 'RANK_LOST',
    what,
    ranks,
    cause,
    rule: 'every rank takes part in every operation',
    remedy: 'look at the output of the lost ranks for the first error',
  }
}

/** `rank 1`, `ranks 1, 3` */
export function nameRanks(ranks: readonly number[]): string {
  return `${ranks.length === 1 ? 'rank' : 'ranks'} ${ranks.join(', ')}`
}

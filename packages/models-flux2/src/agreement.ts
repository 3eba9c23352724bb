import { type Collectives, exchangeReports, outcomeOf, type RankReport, RankwiseError, reportOf } from '@rankwise/core'

/** How `together` works. */
export interface TogetherOptions<T> {
  /** The ranks of the call; undefined for one that draws alone. */
  readonly collectives: Collectives | undefined
  /** Text that has to be equal on all ranks, at most 1000 bytes. @default nothing is compared */
  readonly fingerprint?: (value: T) => string
}

/**
 * Does a part of a call that each rank does for itself, on all ranks or on none: no rank goes on to wait for one that
 * has failed. The group can be used afterwards, whether it succeeds or not.
 *
 * @throws what `work` threw on this rank; RankwiseError `CALL_FAILED_ELSEWHERE` naming the first rank that failed;
 *   `OPTIONS_DIFFER` on every rank when fingerprints differ; those of the collectives
 */
export async function together<T>(
  work: () => Promise<T>,
  { collectives, fingerprint = () => '' }: TogetherOptions<T>,
): Promise<T> {
  if (collectives === undefined || collectives.worldSize === 1) return work()
  const outcome = await outcomeOf(work)
  const own = 'error' in outcome ? reportOf('failed', outcome) : done(fingerprint(outcome.value))
  const reports = await exchangeReports(own, collectives).catch((error: unknown) => {
    // Others learn from the collectives that something is wrong; here, why this rank failed is worth more.
    throw 'error' in outcome ? outcome.error : error
  })
  if ('error' in outcome) throw outcome.error
  requireAgreement(reports, collectives.rank)
  return outcome.value
}

type Report = RankReport<'done' | 'failed'>

function done(fingerprint: string): Report {
  return { kind: 'done', code: '', message: fingerprint }
}

function requireAgreement(reports: readonly Report[], rank: number): void {
  const failed = reports.findIndex(({ kind }) => kind === 'failed')
  if (failed >= 0) {
    const { code, message } = reports[failed] as Report
    throw new RankwiseError('CALL_FAILED_ELSEWHERE', `rank ${failed} cannot draw`, {
      actual: { rank: failed, code, message },
      rule: 'the ranks of a group draw a picture together or not at all',
    })
  }
  const different = reports.flatMap(({ message }, other) => (message === reports[0]?.message ? [] : [other]))
  if (different.length === 0) return
  throw new RankwiseError('OPTIONS_DIFFER', 'the ranks were asked for different pictures', {
    actual: { rank, differentFromRank0: different },
    rule: 'all ranks call the pipeline with the same prompts, images, seeds, sizes, steps and guidance',
  })
}

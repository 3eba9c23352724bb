import type { Collectives } from '../collectives.ts'
import { RankwiseError } from '../errors.ts'
import { exchangeReports, type Outcome, outcomeOf, type RankReport, reportOf } from '../rank-report.ts'
import { Tensor } from '../tensor.ts'

/** Ranks that save together: after every step they all go on, or all stop with an error. */
export class RankAgreement {
  readonly rank: number
  readonly worldSize: number
  readonly #collectives: Collectives | undefined

  /** @param collectives Undefined for a rank that is alone. */
  constructor(collectives: Collectives | undefined) {
    this.rank = collectives?.rank ?? 0
    this.worldSize = collectives?.worldSize ?? 1
    this.#collectives = collectives
  }

  /**
   * Takes a step and waits until every rank has. Every rank calls it the same number of times.
   *
   * @param release Frees what the step made when another rank has failed.
   * @throws what the step threw, or a RankwiseError with the code of the lowest rank whose step failed; those of
   *   `Collectives`
   */
  async step<T>(action: () => T | Promise<T>, release?: (value: T) => Promise<void>): Promise<T> {
    const outcome = await outcomeOf(action)
    if ('error' in outcome) {
      // When the others cannot be told, they learn it from the collectives; why this rank failed is worth more.
      await this.#failures(outcome).catch(() => {})
      throw outcome.error
    }
    try {
      const [failure] = await this.#failures(outcome)
      if (failure !== undefined) throw failure
      return outcome.value
    } catch (error) {
      await release?.(outcome.value)
      throw error
    }
  }

  /** What rank 0 has for all: its bytes, of which every rank gives as many. @throws RankwiseError as `Collectives` */
  async fromFirst(bytes: Uint8Array): Promise<Uint8Array> {
    const tensor = new Tensor('uint8', [bytes.length], bytes)
    await this.#collectives?.broadcast(tensor)
    return tensor.data
  }

  /** Errors of all ranks that failed, in rank order. */
  async #failures(outcome: Outcome<unknown>): Promise<readonly RankwiseError[]> {
    if (this.#collectives === undefined) return []
    const own = 'error' in outcome ? reportOf('failed', outcome) : reportOf('done')
    const reports = await exchangeReports<'done' | 'failed'>(own, this.#collectives)
    return reports.map(failureOf).filter((failure) => failure !== undefined)
  }
}

function failureOf({ kind, code, message }: RankReport<'done' | 'failed'>, rank: number): RankwiseError | undefined {
  if (kind === 'done') return undefined
  return new RankwiseError(code, `rank ${rank} failed`, { actual: { message } })
}

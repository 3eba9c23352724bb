import { RankwiseError } from './errors.ts'
import { textOf } from './value-text.ts'

/** Splits a model over the ranks of the process group. */
export class TensorParallelConfig {
  /** Number of ranks that share every split weight. */
  readonly tpDegree: number

  /** @throws RankwiseError `TP_DEGREE_INVALID` */
  constructor(options: { readonly tpDegree: number }) {
    if (!Number.isInteger(options.tpDegree) || options.tpDegree < 1) {
      throw new RankwiseError('TP_DEGREE_INVALID', `${textOf(options.tpDegree)} is not a tensor-parallel degree`, {
        where: 'TensorParallelConfig.tpDegree',
        rule: 'tpDegree is a positive integer',
      })
    }
    this.tpDegree = options.tpDegree
  }
}

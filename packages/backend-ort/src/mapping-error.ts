import { RankwiseError } from '@rankwise/core'

/** An error that says why nothing is mapped here, or why a file or a tensor in it is not. */
export function mappingError(where: string, reason: string, cause?: unknown): RankwiseError {
  return new RankwiseError('BACKEND_MAPPING', `weights cannot be mapped: ${reason}`, {
    where,
    actual: { reason },
    rule: "with weights: 'mapped', every weight whose bytes are consecutive in a file is mapped",
    remedy: "use weights: 'auto', which reads what cannot be mapped",
    cause,
  })
}

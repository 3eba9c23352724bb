import type { Collectives } from './collectives.ts'
import { RankwiseError } from './errors.ts'
import { Tensor } from './tensor.ts'
import { textOf } from './value-text.ts'

/** How some work ended on this rank. */
export type Outcome<T> = { readonly value: T } | { readonly error: unknown }

/** What a rank tells the others of work that they do together. */
export interface RankReport<K extends string> {
  readonly kind: K
  /** Of its error; empty without one. */
  readonly code: string
  readonly message: string
}

/** In which a rank says how far it is and, where it failed, why: all ranks send as many bytes. */
const REPORT_BYTES = 2048

/** The outcome of some work, which never throws. */
export async function outcomeOf<T>(work: () => T | Promise<T>): Promise<Outcome<T>> {
  try {
    return { value: await work() }
  } catch (error) {
    return { error }
  }
}

/** The report of a rank that has failed, or of one that has not. */
export function reportOf<K extends string>(kind: K, outcome?: { readonly error: unknown }): RankReport<K> {
  if (outcome === undefined) return { kind, code: '', message: '' }
  const { error } = outcome
  return {
    kind,
    code: error instanceof RankwiseError ? error.code : 'RANK_FAILED',
    message: error instanceof Error ? error.message : textOf(error),
  }
}

/** What every rank reports, in rank order; messages are cut to fit. @throws RankwiseError as `Collectives` */
export async function exchangeReports<K extends string>(
  own: RankReport<K>,
  collectives: Collectives,
): Promise<readonly RankReport<K>[]> {
  // No signal: it would end the group, and not only the work.
  const { data } = await collectives.allGather(new Tensor('uint8', [REPORT_BYTES], encode(own)))
  return Array.from({ length: collectives.worldSize }, (_, rank) =>
    decode((data as Uint8Array).subarray(rank * REPORT_BYTES, (rank + 1) * REPORT_BYTES)),
  )
}

/** Lines: the kind, the code, the message. */
function encode({ kind, code, message }: RankReport<string>): Uint8Array {
  const bytes = new Uint8Array(REPORT_BYTES)
  new TextEncoder().encodeInto([kind, code, message].join('\n'), bytes)
  return bytes
}

function decode<K extends string>(bytes: Uint8Array): RankReport<K> {
  const end = bytes.indexOf(0)
  const text = new TextDecoder().decode(end < 0 ? bytes : bytes.subarray(0, end))
  const [kind, code = '', ...message] = text.split('\n')
  return { kind: kind as K, code, message: message.join('\n') }
}

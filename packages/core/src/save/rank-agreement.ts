import type { Collectives } from '../collectives.ts'
import { RankwiseError } from '../errors.ts'
import { Tensor } from '../tensor.ts'

/** Bytes in which a rank tells the others why it failed. */
const RECORD_BYTES = 1024

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
    const records = await this.#collectives.allGather(new Tensor('uint8', [RECORD_BYTES], encode(outcome)))
    const bytes = records.data as Uint8Array
    return Array.from({ length: this.worldSize }, (_, rank) =>
      decode(bytes.subarray(rank * RECORD_BYTES, (rank + 1) * RECORD_BYTES), rank),
    ).filter((failure) => failure !== undefined)
  }
}

type Outcome<T> = { readonly value: T } | { readonly error: unknown }

async function outcomeOf<T>(action: () => T | Promise<T>): Promise<Outcome<T>> {
  try {
    return { value: await action() }
  } catch (error) {
    return { error }
  }
}

/** Code and message on lines of their own, cut to fit; nothing when the step succeeded. */
function encode(outcome: Outcome<unknown>): Uint8Array {
  const record = new Uint8Array(RECORD_BYTES)
  if (!('error' in outcome)) return record
  const { error } = outcome
  const code = error instanceof RankwiseError ? error.code : 'RANK_FAILED'
  const message = error instanceof Error ? error.message : String(error)
  new TextEncoder().encodeInto(`${code}\n${message}`, record)
  return record
}

function decode(record: Uint8Array, rank: number): RankwiseError | undefined {
  const end = record.indexOf(0)
  if (end === 0) return undefined
  const text = new TextDecoder().decode(end < 0 ? record : record.subarray(0, end))
  const [code, ...message] = text.split('\n')
  return new RankwiseError(code as string, `rank ${rank} failed`, { actual: { message: message.join('\n') } })
}

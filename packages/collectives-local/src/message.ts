import { RankwiseError, type Store, type StoreWaitOptions } from '@rankwise/core'

/** A message between ranks: an object in JSON. */
export type Fields = Readonly<Record<string, unknown>>

/** An error that one rank tells another instead of what it waits for. */
interface ErrorMessage {
  readonly error: { readonly code: string; readonly what: string }
}

/** Sets a value of the store to a message. */
export function send(store: Store, key: string, message: unknown): Promise<void> {
  return store.set(key, new TextEncoder().encode(JSON.stringify(message)))
}

/**
 * The message under a key, once a rank has sent it.
 *
 * @throws RankwiseError with the code of the error that the rank told instead; `RENDEZVOUS_MESSAGE` when it is no message
 */
export async function receive(store: Store, key: string, options: StoreWaitOptions): Promise<Fields> {
  const message = parse(await store.get(key, options))
  if (message === undefined) throw unreadable(key)
  const { code, what } = fieldsOf(message.error) ?? {}
  if (typeof code === 'string' && typeof what === 'string') throw new RankwiseError(code, what, { where: 'rendezvous' })
  return message
}

export function errorMessage(error: unknown): ErrorMessage {
  if (error instanceof RankwiseError) {
    const [first = ''] = error.message.split('\n')
    return { error: { code: error.code, what: first.replace(`[${error.code}] `, '') } }
  }
  return { error: { code: 'RENDEZVOUS_FAILED', what: error instanceof Error ? error.message : String(error) } }
}

/** The fields of an object; undefined for anything else. */
export function fieldsOf(value: unknown): Fields | undefined {
  return typeof value === 'object' && value !== null ? (value as Fields) : undefined
}

/** @returns the error about a message that has not the fields it should have */
export function unreadable(what: string): RankwiseError {
  return new RankwiseError('RENDEZVOUS_MESSAGE', `${what}: what a rank told cannot be read`, {
    where: 'rendezvous',
    rule: 'all ranks run the same version of @rankwise/collectives-local, and nobody else writes to their store',
  })
}

function parse(bytes: Uint8Array): Fields | undefined {
  try {
    return fieldsOf(JSON.parse(new TextDecoder().decode(bytes)))
  } catch {
    return undefined
  }
}

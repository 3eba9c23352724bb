/** Why an attempt failed that is worth another one. It never leaves the hub's own code. */
export class TransientError extends Error {
  readonly status: number | undefined
  /** How long the server asked to wait. */
  readonly retryAfterMs: number | undefined

  constructor(reason: string, details: { readonly status?: number; readonly retryAfterMs?: number | undefined } = {}) {
    super(reason)
    this.name = 'TransientError'
    this.status = details.status
    this.retryAfterMs = details.retryAfterMs
  }
}

/**
 * What `fetch` throws when the network fails: as a reason in one word, because its own messages may quote addresses and
 * headers.
 */
export function networkFailure(error: unknown): TransientError {
  const { code, name, cause } = error as { code?: unknown; name?: unknown; cause?: { code?: unknown; name?: unknown } }
  const reason = [cause?.code, code, cause?.name, name].find((part) => typeof part === 'string' && !GENERIC.has(part))
  return new TransientError(reason === undefined ? 'connection lost' : String(reason))
}

const GENERIC: ReadonlySet<string> = new Set(['Error', 'TypeError'])

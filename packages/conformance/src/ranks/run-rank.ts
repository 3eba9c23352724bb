/** What one rank did: its value, or why it has none. */
export interface RankOutcome<T> {
  readonly rank: number
  readonly value?: T
  readonly error?: { readonly code: string; readonly message: string }
  /** Milliseconds since 1970 at which the outcome was there. */
  readonly at: number
  readonly exit: { readonly code: number | null; readonly signal: NodeJS.Signals | null }
}

export type Message<T> =
  | { readonly ready: true }
  | { readonly value: T }
  | { readonly error: { code: string; message: string } }

/**
 * The body of a worker module: takes the argument of the test, sends back what `body` returns or throws, and ends.
 *
 * @param body - gets the argument and a function that tells the test that the rank is in the middle of its work
 */
export function runRank<A, T>(body: (argument: A, ready: () => void) => Promise<T>): void {
  const send = (message: Message<T>) => new Promise((resolve) => process.send?.(message, undefined, {}, resolve))
  process.once('message', ({ argument }: { argument: A }) => {
    body(argument, () => void send({ ready: true }))
      .then(
        (value) => send({ value }),
        (error: Error & { code?: string }) =>
          send({ error: { code: error.code ?? error.name, message: error.stack ?? error.message } }),
      )
      .finally(() => process.disconnect())
  })
}

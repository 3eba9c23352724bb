import { describe, it } from 'vitest'

/** One thing that is checked. It knows no test runner, so that it can also be tried on what is broken on purpose. */
export interface Check {
  readonly title: string
  /** Throws where it is not so. */
  readonly run: () => Promise<void>
  /** Longest time it may take, in milliseconds. @default that of the test runner */
  readonly timeoutMs?: number
}

/** Checks of one subject. */
export interface CheckGroup {
  readonly title: string
  readonly checks: readonly Check[]
}

/** Hands checks to vitest, a `describe` per group. */
export function defineChecks(title: string, groups: readonly CheckGroup[]): void {
  describe(title, () => {
    for (const group of groups) {
      describe(group.title, () => {
        for (const { title: name, run, timeoutMs } of group.checks) it(name, run, timeoutMs)
      })
    }
  })
}

/** @throws Error unless `promise` fails with one of the codes */
export async function expectCode(promise: Promise<unknown>, ...codes: readonly string[]): Promise<void> {
  const outcome = await promise.then(
    () => undefined,
    (error: unknown) => error,
  )
  if (outcome === undefined) throw new Error(`nothing was thrown; expected ${codes.join(' or ')}`)
  const { code } = outcome as { readonly code?: unknown }
  if (!codes.includes(String(code))) {
    throw new Error(`an error of the code ${code} was thrown; expected ${codes.join(' or ')}`, { cause: outcome })
  }
}

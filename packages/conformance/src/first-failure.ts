import { setTimeout as delay } from 'node:timers/promises'
import type { CheckGroup } from './check.ts'

/** A check that failed, and why. */
export interface Failure {
  /** `group > check`. */
  readonly check: string
  readonly message: string
}

/** What is broken may also never end. */
const LIMIT_MS = 20_000

/**
 * Runs checks one after the other up to the first that fails: how a suite is tried on something that is broken on purpose.
 *
 * @returns undefined when all pass
 */
export async function firstFailure(groups: readonly CheckGroup[]): Promise<Failure | undefined> {
  for (const { title, checks } of groups) {
    for (const check of checks) {
      const timer = new AbortController()
      const endless = delay(LIMIT_MS, undefined, { signal: timer.signal }).then(() => {
        throw new Error(`it has not ended after ${LIMIT_MS / 1000} s`)
      })
      endless.catch(() => {})
      try {
        await Promise.race([check.run(), endless])
      } catch (error) {
        return { check: `${title} > ${check.title}`, message: error instanceof Error ? error.message : String(error) }
      } finally {
        timer.abort()
      }
    }
  }
  return undefined
}

import { expect, type TestContext } from 'vitest'
import type { CheckGroup } from './check.ts'
import { firstFailure } from './first-failure.ts'

declare module 'vitest' {
  interface TaskMeta {
    /** The check that caught a mutant; empty where none did. Rankwise's `pnpm test:mutants` lists it. */
    caughtBy?: string
  }
}

/**
 * The body of a test of something that is broken on purpose: fails unless one of the checks notices. A suite proves with
 * such mutants that it can fail.
 *
 * @param context - of the test
 */
export async function expectCaught(groups: readonly CheckGroup[], { task }: Pick<TestContext, 'task'>): Promise<void> {
  expect(groups.length, 'there are checks to run').toBeGreaterThan(0)
  const failure = await firstFailure(groups)
  task.meta.caughtBy = failure?.check ?? ''
  expect(failure, 'no check notices').toBeDefined()
}

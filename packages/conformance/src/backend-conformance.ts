import { describe, it } from 'vitest'
import { contractGroups } from './backend/contract-checks.ts'
import { modelGroup } from './backend/model-checks.ts'
import { opGroups } from './backend/op-checks.ts'
import { type BackendConformanceOptions, backendSubject } from './backend/options.ts'
import { rankChecks } from './backend/rank-checks.ts'
import { segmentGroup } from './backend/segment-checks.ts'
import { styleGroup } from './backend/style-checks.ts'
import { weightGroups } from './backend/weight-checks.ts'
import { type CheckGroup, defineChecks } from './check.ts'

/** Everything that is checked of a backend in one process, for those who run it without vitest. */
export function backendChecks(options: BackendConformanceOptions): readonly CheckGroup[] {
  const subject = backendSubject(options)
  return [
    ...contractGroups(subject),
    ...opGroups(subject),
    segmentGroup(subject),
    ...weightGroups(subject),
    styleGroup(subject),
    modelGroup(subject),
  ]
}

/**
 * Defines the tests that every backend passes: operations in every declared dtype, segments, weights and their slices,
 * parallel styles, blocks and a tiny transformer at 1, 2 and 4 ranks, memory, errors, cancellation and dispose. Call it at
 * the top level of a test file.
 */
export function defineBackendConformance(options: BackendConformanceOptions): void {
  defineChecks('a backend', backendChecks(options))
  const { worker } = options
  const { dtypes } = backendSubject(options).supports
  describe('a backend, on real processes', () => {
    if (worker === undefined) it.todo('not run: no worker module is given')
    else for (const { title, run, timeoutMs } of rankChecks(worker, dtypes)) it(title, run, timeoutMs)
  })
}

import type { Backend, Capabilities } from '@rankwise/core'

/** What `defineBackendConformance` tests. */
export interface BackendConformanceOptions {
  /** A new backend. Several may be alive at a time, as several ranks of one process would have them. */
  readonly create: () => Promise<Backend> | Backend
  /**
   * What the backend has to declare; every dtype is tested, and every other dtype has to be refused.
   * @default { dtypes: ['float32'] }
   */
  readonly supports?: Capabilities
  /**
   * How a column-wise shard may differ from the same rows of the whole product: `exact` where an output feature is
   * computed the same way whatever the others are, `close` where the kernel sums in another order at other sizes.
   * @default 'exact'
   */
  readonly colwise?: 'exact' | 'close'
  /**
   * A module that calls `runBackendRank`, for the tests on real processes. Without it they are reported as skipped.
   */
  readonly worker?: URL
}

/** Options with their defaults. */
export type BackendSubject = Required<Omit<BackendConformanceOptions, 'worker'>>

/** Fills in the defaults. */
export function backendSubject({ create, supports, colwise }: BackendConformanceOptions): BackendSubject {
  return { create, supports: supports ?? { dtypes: ['float32'] }, colwise: colwise ?? 'exact' }
}

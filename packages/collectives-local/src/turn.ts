import type { Operation } from '@rankwise/core/collectives'

/** One operation as it runs on this rank. */
export interface Turn {
  readonly operation: Operation
  readonly signal: AbortSignal | undefined
  /** When the wait for other ranks ends; set when it begins, so that an operation that never waits asks no clock. */
  deadline: number | undefined
}

import { RankwiseError } from './errors.ts'
import type { Attributes, Value } from './graph.ts'
import type { Parameter } from './parameter.ts'
import type { Tensor } from './tensor.ts'

/** What records operations while a `forward` runs. */
export interface ActiveTrace {
  emit(op: string, operands: readonly (Value | Parameter)[], attributes: Attributes): readonly Value[]
  constant(data: Tensor): Value
  /** Runs `body` with `module` as the place that errors and printed graphs name. */
  within<T>(module: object, body: () => T): T
}

let active: ActiveTrace | undefined

/** The trace that records at the moment. @throws RankwiseError `TRACE_INACTIVE` outside of `trace` */
export function activeTrace(): ActiveTrace {
  if (active === undefined) {
    throw new RankwiseError('TRACE_INACTIVE', 'forward was called outside of a trace', {
      rule: "a module's forward describes the computation; it does not run it",
      remedy: 'call the model itself',
    })
  }
  return active
}

/** Records with `trace` while `body` runs; tracing is synchronous, so there is one at a time. */
export function withTrace<T>(trace: ActiveTrace, body: () => T): T {
  const outer = active
  active = trace
  try {
    return body()
  } finally {
    active = outer
  }
}

import { outcomeOf } from '@rankwise/core'

type Load = (signal: AbortSignal) => Promise<AsyncDisposable>

/** How `loadAll` loads. */
export interface LoadAllOptions {
  /** Whether the loads run at the same time; otherwise in their order. */
  readonly isParallel: boolean
  /** Aborts all of them. */
  readonly signal: AbortSignal
}

/**
 * Loads all or none: where one fails, the others are aborted and waited for, and what was loaded is freed.
 *
 * @param loads - by name; each gets a signal that is aborted when another fails
 * @throws what the first to fail threw
 */
export async function loadAll(
  loads: Readonly<Record<string, Load>>,
  { isParallel, signal }: LoadAllOptions,
): Promise<Readonly<Record<string, AsyncDisposable>>> {
  const stop = new AbortController()
  const loaded = new Map<string, AsyncDisposable>()
  let failure: { readonly error: unknown } | undefined
  const begin = async ([name, load]: readonly [string, Load]) => {
    const outcome = await outcomeOf(() => load(AbortSignal.any([signal, stop.signal])))
    if ('value' in outcome) {
      loaded.set(name, outcome.value)
    } else {
      // Only the first: the others may have failed because they were aborted.
      failure ??= outcome
      stop.abort(outcome.error)
    }
  }
  const all = Object.entries(loads)
  if (isParallel) await Promise.all(all.map(begin))
  else for (const each of all) if (failure === undefined) await begin(each)
  if (failure === undefined) return Object.fromEntries(loaded)
  for (const model of loaded.values()) await model[Symbol.asyncDispose]()
  throw failure.error
}

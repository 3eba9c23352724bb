/**
 * What an event is: a run of a traced graph, a segment or an all-reduce of it, the tracing and compiling before its first
 * run, or a stage of what the caller does, such as a denoising step.
 */
export type ProfileCategory = 'run' | 'segment' | 'all_reduce' | 'compile' | 'stage'

/** What is measured. */
export interface ProfileActivity {
  readonly category: ProfileCategory
  readonly name: string
  /** Name of the traced graph that it belongs to; none for a stage. */
  readonly graph?: string
  /** Floating-point operations of this rank; a multiply-add counts as 2. */
  readonly flops?: number
  /** Bytes that this rank gives to an all-reduce. */
  readonly bytes?: number
}

/** Something that took time on this rank. */
export interface ProfileEvent extends ProfileActivity {
  /** Microseconds since the epoch, by the clock of the machine. */
  readonly start: number
  /** Microseconds. */
  readonly duration: number
}

const active = new Set<Profiler>()

/**
 * Records what this process does from its creation until it is disposed of: every run of a model, and the segments and
 * all-reduces of it. Without one, nothing is measured.
 *
 *     using profiler = new Profiler()
 *     await pipeline({ prompt })
 *     const trace = chromeTrace([profiler.events])
 */
export class Profiler implements Disposable {
  readonly #events: ProfileEvent[] = []

  constructor() {
    active.add(this)
  }

  /** What has ended so far, in the order in which it ended. */
  get events(): readonly ProfileEvent[] {
    return this.#events
  }

  /** Stops recording; idempotent. The events stay. */
  stop(): void {
    active.delete(this)
  }

  /** `stop`, for `using`. */
  [Symbol.dispose](): void {
    this.stop()
  }

  /** Adds an event to every profiler that records. */
  static record(event: ProfileEvent): void {
    for (const profiler of active) profiler.#events.push(event)
  }
}

/** Does work, and records it as an event, also when it fails. Costs nothing while nobody records. */
export async function profiled<T>(activity: ProfileActivity, work: () => Promise<T>): Promise<T> {
  if (active.size === 0) return work()
  const started = performance.now()
  try {
    return await work()
  } finally {
    const start = 1000 * (performance.timeOrigin + started)
    Profiler.record({ ...activity, start, duration: 1000 * (performance.now() - started) })
  }
}

import type { ProfileCategory, ProfileEvent } from './profiler.ts'

/** Where the time of all runs of one traced graph went, on one rank. Times are seconds. */
export interface GraphProfile {
  readonly graph: string
  readonly runs: number
  /** Of all runs, compiling not included. */
  readonly seconds: number
  readonly segmentSeconds: number
  readonly allReduceSeconds: number
  /** Tracing and compiling, before the first run at given shapes. */
  readonly compileSeconds: number
  readonly allReduces: number
  readonly allReduceBytes: number
  readonly flops: number
}

/** The graphs that ran, in the order in which they first did. */
export function profileSummary(events: readonly ProfileEvent[]): readonly GraphProfile[] {
  const graphs = [...new Set(events.flatMap(({ graph }) => graph ?? []))]
  return graphs.map((graph) => {
    const own = events.filter((event) => event.graph === graph)
    const of = (category: ProfileCategory) => own.filter((event) => event.category === category)
    const [runs, segments, allReduces] = [of('run'), of('segment'), of('all_reduce')]
    return {
      graph,
      runs: runs.length,
      seconds: secondsOf(runs),
      segmentSeconds: secondsOf(segments),
      allReduceSeconds: secondsOf(allReduces),
      compileSeconds: secondsOf(of('compile')),
      allReduces: allReduces.length,
      allReduceBytes: sum(allReduces.map(({ bytes = 0 }) => bytes)),
      flops: sum(segments.map(({ flops = 0 }) => flops)),
    }
  })
}

function secondsOf(events: readonly ProfileEvent[]): number {
  return sum(events.map(({ duration }) => duration)) / 1e6
}

function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0)
}

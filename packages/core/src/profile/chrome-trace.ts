import type { ProfileCategory, ProfileEvent } from './profiler.ts'

/** Events in the Trace Event Format, which chrome://tracing and ui.perfetto.dev show. */
export interface ChromeTrace {
  readonly displayTimeUnit: 'ms'
  readonly traceEvents: readonly object[]
}

/** Rows of a rank: what nests lies in one, what is in another does not have to nest with it. */
const ROWS: Readonly<Record<Exclude<ProfileCategory, 'stage'>, number>> = {
  run: 1,
  compile: 1,
  segment: 2,
  all_reduce: 2,
}

const ROW_NAMES = ['', 'runs', 'segments and collectives']

/**
 * A trace with a process for every rank.
 *
 * @param ranks - the events of every rank, in rank order; the ranks of one machine have one clock
 */
export function chromeTrace(ranks: readonly (readonly ProfileEvent[])[]): ChromeTrace {
  const traceEvents = ranks.flatMap((events, rank) => [
    metadata(rank, 'process_name', { name: `rank ${rank}` }),
    metadata(rank, 'process_sort_index', { sort_index: rank }),
    ...ROW_NAMES.flatMap((name, tid) => (name === '' ? [] : [metadata(rank, 'thread_name', { name }, tid)])),
    ...events.flatMap((event, id) => traceEventsOf(event, rank, id)),
  ])
  return { displayTimeUnit: 'ms', traceEvents }
}

function metadata(pid: number, name: string, args: object, tid = 0): object {
  return { ph: 'M', pid, tid, name, args }
}

function traceEventsOf(event: ProfileEvent, pid: number, id: number): readonly object[] {
  const { category, name, start, duration, graph, flops, bytes } = event
  const common = { name, cat: category, pid }
  if (category === 'stage') {
    // Stages may overlap without one being inside the other: those are asynchronous events.
    return [
      { ...common, ph: 'b', id, tid: 0, ts: start },
      { ...common, ph: 'e', id, tid: 0, ts: start + duration },
    ]
  }
  const gflops = flops === undefined || duration === 0 ? undefined : flops / duration / 1000
  return [{ ...common, ph: 'X', tid: ROWS[category], ts: start, dur: duration, args: { graph, flops, gflops, bytes } }]
}

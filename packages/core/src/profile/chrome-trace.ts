import type { ProfileEvent } from './profiler.ts'
import { traceRows } from './trace-rows.ts'

/** Events in the Trace Event Format, which chrome://tracing and ui.perfetto.dev show. */
export interface ChromeTrace {
  readonly displayTimeUnit: 'ms'
  readonly traceEvents: readonly object[]
}

/**
 * A trace with a process for every rank. Runs of one rank that overlap are in rows of their own.
 *
 * @param ranks - the events of every rank, in rank order; the ranks of one machine have one clock
 */
export function chromeTrace(ranks: readonly (readonly ProfileEvent[])[]): ChromeTrace {
  const traceEvents = ranks.flatMap((events, rank) => {
    const { rows, names } = traceRows(events)
    return [
      metadata(rank, 'process_name', { name: `rank ${rank}` }),
      metadata(rank, 'process_sort_index', { sort_index: rank }),
      ...names.map((name, i) => metadata(rank, 'thread_name', { name }, i + 1)),
      ...events.flatMap((event, id) => traceEventsOf(event, { pid: rank, tid: rows[id] as number, id })),
    ]
  })
  return { displayTimeUnit: 'ms', traceEvents }
}

function metadata(pid: number, name: string, args: object, tid = 0): object {
  return { ph: 'M', pid, tid, name, args }
}

/** Where an event is in a trace. */
interface Place {
  readonly pid: number
  readonly tid: number
  readonly id: number
}

function traceEventsOf(event: ProfileEvent, { pid, tid, id }: Place): readonly object[] {
  const { category, name, start, duration, graph, flops, bytes } = event
  const common = { name, cat: category, pid }
  if (category === 'stage') {
    // Stages may overlap without one being inside the other: those are asynchronous events.
    return [
      { ...common, ph: 'b', id, tid, ts: start },
      { ...common, ph: 'e', id, tid, ts: start + duration },
    ]
  }
  const gflops = flops === undefined || duration === 0 ? undefined : flops / duration / 1000
  return [{ ...common, ph: 'X', tid, ts: start, dur: duration, args: { graph, flops, gflops, bytes } }]
}

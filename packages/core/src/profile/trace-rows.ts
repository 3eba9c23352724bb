import type { ProfileEvent } from './profiler.ts'

/**
 * Rows of a rank in a trace: one of runs, and below it one of the segments and collectives of these runs. A viewer takes what
 * overlaps in a row for nested, so runs that overlap get further pairs of rows.
 */
export interface TraceRows {
  /** Of every event, in their order; 0 for stages, which are in no row. */
  readonly rows: readonly number[]
  /** In the order of their numbers, from row 1. */
  readonly names: readonly string[]
}

/**
 * Microseconds by which an event may begin before the one before it has ended. Times since the epoch are doubles of which
 * the nearest are 0.25 µs apart, and an end is the sum of two.
 */
const SLACK_US = 1

/** A pair of rows, as far as it is filled. */
interface Lane {
  run: ProfileEvent | undefined
  segment: ProfileEvent | undefined
}

/** Puts every event into the first row that is free for it; segments below a run of their graph, where there is one. */
export function traceRows(events: readonly ProfileEvent[]): TraceRows {
  const lanes: Lane[] = [{ run: undefined, segment: undefined }]
  const rows = events.map(() => 0)
  // What holds another comes first.
  const order = [...events.keys()].sort((a, b) => {
    const [first, second] = [events[a] as ProfileEvent, events[b] as ProfileEvent]
    return first.start - second.start || second.duration - first.duration
  })
  for (const i of order) {
    const event = events[i] as ProfileEvent
    if (event.category === 'stage') continue
    const kind = event.category === 'segment' || event.category === 'all_reduce' ? 'segment' : 'run'
    const lane = freeLane(lanes, kind, event)
    lane[kind] = event
    rows[i] = 2 * lanes.indexOf(lane) + (kind === 'run' ? 1 : 2)
  }
  return { rows, names: lanes.flatMap((_, i) => namesOf(i)) }
}

/** A new one where none is free. */
function freeLane(lanes: Lane[], kind: keyof Lane, event: ProfileEvent): Lane {
  const free = lanes.filter((lane) => isBefore(lane[kind], event))
  const own = kind === 'segment' ? free.find(({ run }) => holds(run, event)) : undefined
  const found = own ?? free[0]
  if (found !== undefined) return found
  const added: Lane = { run: undefined, segment: undefined }
  lanes.push(added)
  return added
}

function isBefore(last: ProfileEvent | undefined, { start }: ProfileEvent): boolean {
  return last === undefined || endOf(last) <= start + SLACK_US
}

function holds(run: ProfileEvent | undefined, event: ProfileEvent): boolean {
  return run !== undefined && run.graph === event.graph && endOf(event) <= endOf(run) + SLACK_US
}

function endOf({ start, duration }: ProfileEvent): number {
  return start + duration
}

function namesOf(lane: number): readonly string[] {
  const number = lane === 0 ? '' : ` ${lane + 1}`
  return [`runs${number}`, `segments and collectives${number}`]
}

import type { ByteRange } from '../checkpoint/shard-layout.ts'

/** A range of a file that someone needs. */
export interface WantedRange<T> extends ByteRange {
  readonly file: string
  readonly owner: T
}

/** One request: a range of a file that holds the wanted ranges, in the order of the file. */
export interface RangeRequest<T> extends ByteRange {
  readonly file: string
  readonly wanted: readonly WantedRange<T>[]
}

/** Most bytes of one request: what a broken connection costs, and what one of four requests at a time holds up. */
export const MAX_REQUEST_BYTES = 16 * 1024 * 1024

/** The part of a request that may lie between its ranges, and so be fetched in vain: 1 / 64, or 1.6 %. */
const MAX_WASTE = 1 / 64

/**
 * Plans the requests for some ranges: long ones are cut, and neighbours share a request where little lies between
 * them. Requests are in the order of the files and of their bytes.
 */
export function planRequests<T>(ranges: readonly WantedRange<T>[]): readonly RangeRequest<T>[] {
  const files = new Map([...new Set(ranges.map(({ file }) => file))].map((file, i) => [file, i]))
  const place = ({ file }: WantedRange<T>) => files.get(file) as number
  const sorted = ranges.flatMap((range) => [...cut(range)]).sort((a, b) => place(a) - place(b) || a.offset - b.offset)
  const requests: OpenRequest<T>[] = []
  for (const range of sorted) {
    const last = requests.at(-1)
    if (last === undefined || !last.join(range)) requests.push(new OpenRequest(range))
  }
  return requests
}

/** A request that ranges are still added to. */
class OpenRequest<T> implements RangeRequest<T> {
  readonly file: string
  readonly offset: number
  readonly wanted: WantedRange<T>[]
  #end: number
  #waste = 0

  constructor(range: WantedRange<T>) {
    this.file = range.file
    this.offset = range.offset
    this.wanted = [range]
    this.#end = range.offset + range.length
  }

  get length(): number {
    return this.#end - this.offset
  }

  /** Adds a range that starts no earlier than the ones before; false when it should have a request of its own. */
  join(range: WantedRange<T>): boolean {
    const end = Math.max(this.#end, range.offset + range.length)
    const waste = this.#waste + Math.max(0, range.offset - this.#end)
    const length = end - this.offset
    if (range.file !== this.file || length > MAX_REQUEST_BYTES || waste > MAX_WASTE * length) return false
    this.wanted.push(range)
    this.#end = end
    this.#waste = waste
    return true
  }
}

function* cut<T>({ offset, length, ...rest }: WantedRange<T>): Generator<WantedRange<T>> {
  for (let start = 0; start < length; start += MAX_REQUEST_BYTES) {
    yield { ...rest, offset: offset + start, length: Math.min(MAX_REQUEST_BYTES, length - start) }
  }
}

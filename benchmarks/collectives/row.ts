import type { EngineName } from './engine.ts'

/** The all-reduces of one engine at one size. */
export interface Row {
  readonly engine: EngineName
  readonly ranks: number
  readonly bytes: number
  /** Of one all-reduce in place: the median of the rounds. */
  readonly microseconds: number
  /** Of the fastest round. */
  readonly minMicroseconds: number
  /** Of the slowest round. */
  readonly maxMicroseconds: number
}

export function rowOf(key: Pick<Row, 'engine' | 'ranks' | 'bytes'>, rounds: readonly number[]): Row {
  return {
    ...key,
    microseconds: median(rounds),
    minMicroseconds: Math.min(...rounds),
    maxMicroseconds: Math.max(...rounds),
  }
}

/** The upper one of two in the middle. */
export function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b)
  return sorted[Math.floor(sorted.length / 2)] as number
}

/** Who is compared with whom: how many times longer the first one takes. */
const COMPARISONS: readonly (readonly [EngineName, EngineName])[] = [
  ['gloo', 'rankwise local'],
  ['openmpi', 'rankwise local'],
  ['openmpi chunked', 'rankwise local'],
  ['rankwise local', 'rankwise in-arena'],
  ['gloo', 'rankwise mpi'],
  ['openmpi tcp', 'rankwise mpi'],
]

export function formatRow(row: Row): string {
  const { microseconds, minMicroseconds, maxMicroseconds } = row
  const gigabytesPerSecond = row.bytes / microseconds / 1000
  return [
    `${keyOf(row)}  ${row.engine.padEnd(17)}`,
    `${formatTime(microseconds)} µs (${formatTime(minMicroseconds).trim()}–${formatTime(maxMicroseconds).trim()})`.padEnd(
      32,
    ),
    `${gigabytesPerSecond.toFixed(2).padStart(6)} GB/s`,
  ].join('  ')
}

/** One line per number of ranks and size, with a column per comparison that was measured. */
export function formatRatios(rows: readonly Row[]): readonly string[] {
  const timeOf = (engine: EngineName, { ranks, bytes }: Row) =>
    rows.find((row) => row.engine === engine && row.ranks === ranks && row.bytes === bytes)?.microseconds
  const names = new Set(rows.map(({ engine }) => engine))
  const measured = COMPARISONS.filter((pair) => pair.every((name) => names.has(name)))
  const cases = rows.filter(
    (row, i) => rows.findIndex(({ ranks, bytes }) => ranks === row.ranks && bytes === row.bytes) === i,
  )
  return cases.map((row) => {
    const columns = measured.map(([slow, fast]) => {
      const ratio = (timeOf(slow, row) ?? Number.NaN) / (timeOf(fast, row) ?? Number.NaN)
      return `${slow} / ${fast} ${(Number.isNaN(ratio) ? '' : `${ratio.toFixed(2)}x`).padStart(8)}`
    })
    return [keyOf(row), ...columns].join('  ')
  })
}

function keyOf({ ranks, bytes }: Row): string {
  return `${ranks} ranks  ${formatBytes(bytes).padStart(8)}`
}

function formatTime(microseconds: number): string {
  return microseconds.toFixed(microseconds < 100 ? 2 : 0).padStart(8)
}

function formatBytes(bytes: number): string {
  if (bytes >= 2 ** 20 && bytes % 2 ** 20 === 0) return `${bytes / 2 ** 20} MiB`
  if (bytes >= 2 ** 10 && bytes % 2 ** 10 === 0) return `${bytes / 2 ** 10} KiB`
  return `${bytes} B`
}

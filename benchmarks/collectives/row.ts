import type { EngineName } from './engine.ts'

/** The all-reduces of one engine at one size. */
export interface Row {
  readonly engine: EngineName
  readonly ranks: number
  readonly bytes: number
  /** Of one all-reduce in place: the median of the batches of all rounds. */
  readonly microseconds: number
  /** Of the fastest batch. */
  readonly minMicroseconds: number
  /** Of the slowest batch. */
  readonly maxMicroseconds: number
}

export function rowOf(key: Pick<Row, 'engine' | 'ranks' | 'bytes'>, batches: readonly number[]): Row {
  const sorted = [...batches].sort((a, b) => a - b)
  return {
    ...key,
    microseconds: sorted[Math.floor(sorted.length / 2)] as number,
    minMicroseconds: sorted[0] as number,
    maxMicroseconds: sorted.at(-1) as number,
  }
}

/** Who is compared with whom: how many times longer the first one takes. */
const COMPARISONS: readonly (readonly [EngineName, EngineName])[] = [
  ['gloo', 'rankwise local'],
  ['openmpi', 'rankwise local'],
  ['openmpi chunked', 'rankwise local'],
  ['rankwise local', 'rankwise in-arena'],
  ['gloo', 'rankwise tcp'],
  ['gloo', 'rankwise mpi'],
  ['openmpi tcp', 'rankwise tcp'],
  ['openmpi tcp', 'rankwise mpi'],
]

export function formatRow({ engine, ranks, bytes, ...row }: Row): string {
  const spread = `${formatTime(row.minMicroseconds)}–${formatTime(row.maxMicroseconds)}`
  return [
    `${ranks} ranks  ${formatBytes(bytes).padStart(COLUMN)}  ${engine.padEnd(17)}`,
    `${formatTime(row.microseconds).padStart(COLUMN)} µs ${`(${spread})`.padEnd(19)}`,
    `${(bytes / row.microseconds / 1000).toFixed(2).padStart(6)} GB/s`,
  ].join('  ')
}

/** A table per number of ranks: a column per size, and for each comparison the ratios of the medians and of the fastest. */
export function formatRatios(rows: readonly Row[]): readonly string[] {
  return [...new Set(rows.map(({ ranks }) => ranks))].flatMap((ranks) => {
    const table = rows.filter((row) => row.ranks === ranks)
    const sizes = [...new Set(table.map(({ bytes }) => bytes))]
    const names = new Set(table.map(({ engine }) => engine))
    const measured = COMPARISONS.filter((pair) => pair.every((name) => names.has(name)))
    return [
      '',
      line(`${ranks} ranks`, sizes.map(formatBytes)),
      ...measured.flatMap(([slow, fast]) => [
        line(`${slow} / ${fast}`, ratios(table, sizes, slow, fast, 'microseconds')),
        line('  fastest batches', ratios(table, sizes, slow, fast, 'minMicroseconds')),
      ]),
    ]
  })
}

function ratios(
  rows: readonly Row[],
  sizes: readonly number[],
  slow: EngineName,
  fast: EngineName,
  field: 'microseconds' | 'minMicroseconds',
): readonly string[] {
  const timeOf = (engine: EngineName, size: number) =>
    rows.find((row) => row.engine === engine && row.bytes === size)?.[field] ?? Number.NaN
  return sizes.map((size) => {
    const ratio = timeOf(slow, size) / timeOf(fast, size)
    return Number.isNaN(ratio) ? '' : `${ratio < 100 ? ratio.toPrecision(3) : ratio.toFixed(0)}x`
  })
}

const TITLE = 34
const COLUMN = 9

function line(title: string, cells: readonly string[]): string {
  return `${title.padEnd(TITLE)}  ${cells.map((cell) => cell.padStart(COLUMN)).join('  ')}`.trimEnd()
}

function formatTime(microseconds: number): string {
  return microseconds.toFixed(microseconds < 100 ? 2 : 0)
}

function formatBytes(bytes: number): string {
  if (bytes >= 2 ** 20 && bytes % 2 ** 20 === 0) return `${bytes / 2 ** 20} MiB`
  if (bytes >= 2 ** 10 && bytes % 2 ** 10 === 0) return `${bytes / 2 ** 10} KiB`
  return `${bytes} B`
}

import type { EngineName } from './engine.ts'
import type { BlockCase, BlockDType } from './job.ts'
import type { Measurement } from './measure.ts'

/** What is measured: one block on one engine. */
export interface RowKey extends BlockCase {
  readonly backend: EngineName
  readonly dtype: BlockDType
  readonly threads: number
}

/** One line of the table. */
export interface Row extends RowKey {
  /** Of one run: the median of those of all rounds. */
  readonly milliseconds: number
  /** Of the fastest run. */
  readonly minMilliseconds: number
  /** Of the slowest run. */
  readonly maxMilliseconds: number
  /** Against float64: of the worst result of all rounds. */
  readonly relRms: number
  /** Of the process that needed most. */
  readonly peakAnonBytes: number
}

/** One process and how wrong its results are. */
export interface CheckedMeasurement extends Measurement {
  readonly relRms: number
}

export function rowOf(
  { backend, dtype, block, tokens, tp, threads }: RowKey,
  rounds: readonly CheckedMeasurement[],
): Row {
  const sorted = rounds.flatMap(({ milliseconds }) => milliseconds).sort((a, b) => a - b)
  return {
    ...{ backend, dtype, block, tokens, tp, threads },
    milliseconds: sorted[Math.floor(sorted.length / 2)] as number,
    minMilliseconds: sorted[0] as number,
    maxMilliseconds: sorted.at(-1) as number,
    relRms: Math.max(...rounds.map(({ relRms }) => relRms)),
    peakAnonBytes: Math.max(...rounds.map(({ peakAnonBytes }) => peakAnonBytes)),
  }
}

export function formatRow(row: Row): string {
  const spread = `(${row.minMilliseconds.toFixed(0)}–${row.maxMilliseconds.toFixed(0)})`
  return [
    keyOf(row),
    row.backend.padEnd(11),
    `${row.milliseconds.toFixed(0).padStart(6)} ms ${spread.padEnd(13)}`,
    `rms ${row.relRms.toExponential(1)}`,
    `anonymous ${(row.peakAnonBytes / 1e6).toFixed(0).padStart(5)} MB`,
  ].join('  ')
}

/** How many times longer torch takes for the same: of the medians, and of the fastest runs. */
export function formatRatios(rows: readonly Row[]): readonly string[] {
  return rows.flatMap((row) => {
    const torch = rows.find((other) => other.backend === 'torch' && keyOf(other) === keyOf(row))
    if (torch === undefined || row === torch) return []
    const ratio = (field: 'milliseconds' | 'minMilliseconds') => `${(torch[field] / row[field]).toFixed(2)}x`
    return [
      [
        keyOf(row),
        `torch / ${row.backend.padEnd(11)}`,
        `${ratio('milliseconds').padStart(6)}`,
        `fastest ${ratio('minMilliseconds').padStart(6)}`,
      ].join('  '),
    ]
  })
}

function keyOf({ block, tokens, tp, threads, dtype }: RowKey): string {
  return `${block} ${String(tokens).padStart(4)} tokens  tp ${tp}  ${threads} thread${threads > 1 ? 's' : ' '}  ${dtype.padEnd(8)}`
}

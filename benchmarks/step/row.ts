import type { Engine } from './engine.ts'
import type { StepCase } from './job.ts'
import type { Measurement } from './measure.ts'
import type { Peak } from './peak.ts'

/** One line of the table: a step on one engine. */
export interface Row extends Omit<StepCase, 'tokens'> {
  readonly engine: string
  readonly backend: string
  /** Of the picture and of the text: `256+512`. */
  readonly tokens: string
  /** Of one step: the median of all rounds. */
  readonly seconds: number
  readonly minSeconds: number
  readonly maxSeconds: number
  /** Of all ranks together. */
  readonly gflops: number
  /** Of the float32 multiply-adds that all threads of all ranks can do; null where nobody measured that. */
  readonly peakShare: number | null
  /** Part of the time that all-reduces took; null where the engine does not tell. */
  readonly collectiveShare: number | null
  /** Of the rank that needed most, in the worst round. */
  readonly peakAnonBytes: number
  /** The part of it that are weights; null where the engine does not tell. */
  readonly readBytes: number | null
  /** Longest time for which the event loop was held, of all rounds; null where there is none. */
  readonly eventLoopMilliseconds: number | null
}

export function rowOf(
  { name, backend, engine }: Pick<Engine, 'name' | 'backend' | 'engine'>,
  { tokens, ...rest }: StepCase,
  rounds: readonly Measurement[],
  { flops, peak }: { readonly flops: number; readonly peak: Peak | undefined },
): Row {
  const { dtype, tp, threads } = rest
  const sorted = rounds.flatMap(({ seconds }) => seconds).sort((a, b) => a - b)
  const seconds = sorted[Math.floor(sorted.length / 2)] as number
  const gflops = flops / seconds / 1e9
  const worst = rounds.reduce((a, b) => (b.peakAnonBytes > a.peakAnonBytes ? b : a))
  const allReduces = rounds.flatMap(({ allReduceSeconds }) => allReduceSeconds ?? [])
  const held = rounds.flatMap(({ eventLoopMilliseconds }) => eventLoopMilliseconds ?? [])
  return {
    engine: backend === 'diffusers' ? name : engine,
    backend,
    dtype,
    tokens: `${tokens.image}+${tokens.text}`,
    tp,
    threads,
    seconds,
    minSeconds: sorted[0] as number,
    maxSeconds: sorted.at(-1) as number,
    gflops,
    peakShare: peak === undefined ? null : gflops / (peak.float32 * tp * threads),
    collectiveShare: allReduces.length === 0 ? null : median(allReduces) / seconds,
    peakAnonBytes: worst.peakAnonBytes,
    readBytes: worst.readBytes,
    eventLoopMilliseconds: held.length === 0 ? null : Math.max(...held),
  }
}

function median(values: readonly number[]): number {
  return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)] as number
}

export function formatRow(row: Row): string {
  const percent = (share: number | null) => (share === null ? '    ?' : `${(100 * share).toFixed(1).padStart(4)}%`)
  const spread = `(${row.minSeconds.toFixed(2)}–${row.maxSeconds.toFixed(2)})`
  const weights = row.readBytes === null ? '' : `, ${(row.readBytes / 1e6).toFixed(0)} of them weights`
  const held = row.eventLoopMilliseconds === null ? '' : `  event loop ${row.eventLoopMilliseconds.toFixed(0)} ms`
  return [
    caseOf(row),
    engineOf(row).padEnd(15),
    `${row.seconds.toFixed(2).padStart(6)} s ${spread.padEnd(14)}`,
    `${row.gflops.toFixed(0).padStart(4)} GFLOP/s ${percent(row.peakShare)} of the peak`,
    `all-reduces ${percent(row.collectiveShare)}`,
    `anonymous ${(row.peakAnonBytes / 1e6).toFixed(0).padStart(5)} MB${weights}${held}`,
  ].join('  ')
}

/** How many times longer torch takes for the same, and one rank of one thread than several. */
export function formatRatios(rows: readonly Row[]): readonly string[] {
  const find = (key: Row) =>
    rows.find((row) => caseOf(row) === caseOf(key) && engineOf(row) === engineOf(key)) as Row | undefined
  const line = (title: string, slow: Row | undefined, fast: Row) => {
    if (slow === undefined) return []
    const ratio = (field: 'seconds' | 'minSeconds') => `${(slow[field] / fast[field]).toFixed(2)}x`
    return [`${title}  ${ratio('seconds').padStart(6)}  fastest ${ratio('minSeconds').padStart(6)}`]
  }
  const peers = rows
    .filter(({ backend }) => backend !== 'diffusers')
    .flatMap((row) => {
      const title = `${caseOf(row)}  torch / ${engineOf(row)}`
      return line(title, find({ ...row, backend: 'diffusers', engine: 'torch' }), row)
    })
  const alone = rows.flatMap((row) => [
    ...(row.tp === 1 ? [] : line(`${caseOf(row)}  ${engineOf(row)} tp 1 / tp ${row.tp}`, find({ ...row, tp: 1 }), row)),
    ...(row.threads === 1
      ? []
      : line(`${caseOf(row)}  ${engineOf(row)} 1 / ${row.threads} threads`, find({ ...row, threads: 1 }), row)),
  ])
  return [...peers, ...alone]
}

/** `ort binding`, `torch`. */
export function engineOf({ backend, engine }: Pick<Row, 'backend' | 'engine'>): string {
  return backend === 'diffusers' ? engine : `${backend} ${engine}`
}

export function caseOf({ tokens, tp, threads, dtype }: Pick<Row, 'tokens' | 'tp' | 'threads' | 'dtype'>): string {
  return `${tokens.padStart(8)} tokens  tp ${tp}  ${threads} thread${threads > 1 ? 's' : ' '}  ${dtype.padEnd(8)}`
}

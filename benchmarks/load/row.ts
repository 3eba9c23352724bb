import type { Engine, Mode } from './engine.ts'
import type { LoadResult } from './measure.ts'
import type { CacheState } from './page-cache.ts'

/** A load and what it left to be fetched. */
export interface CachedLoadResult extends LoadResult {
  /**
   * To read the whole file once after the load: a loader that maps the file leaves pages in storage, and who computes
   * first waits for them. About 0.5 s for 2.35 GB when none is left.
   */
  readonly restSeconds: number
}

/** One line of the table: the loads of one engine in one way. */
export interface Row extends CachedLoadResult {
  readonly tp: number
  readonly mode: Mode
  readonly cache: CacheState
  readonly engine: Engine['name']
  /** Of the fastest load; `seconds` is the median. */
  readonly minSeconds: number
  /** Of the slowest load. */
  readonly maxSeconds: number
}

/** The load of median time, the memory and storage of the worst. */
export function rowOf(key: Pick<Row, 'tp' | 'mode' | 'cache' | 'engine'>, results: readonly CachedLoadResult[]): Row {
  const sorted = [...results].sort((a, b) => a.seconds - b.seconds)
  const middle = sorted[Math.floor(sorted.length / 2)] as CachedLoadResult
  const worst = (field: 'peakAnonBytes' | 'peakPssBytes' | 'totalPssBytes' | 'startAnonBytes' | 'storageBytes') =>
    Math.max(...results.map((result) => result[field]))
  return {
    ...key,
    ...middle,
    minSeconds: (sorted[0] as LoadResult).seconds,
    maxSeconds: (sorted.at(-1) as LoadResult).seconds,
    peakAnonBytes: worst('peakAnonBytes'),
    peakPssBytes: worst('peakPssBytes'),
    totalPssBytes: worst('totalPssBytes'),
    startAnonBytes: worst('startAnonBytes'),
    storageBytes: worst('storageBytes'),
  }
}

export function formatRow(row: Row): string {
  const megabytes = (bytes: number | null) => (bytes === null ? '?' : (bytes / 1e6).toFixed(0)).padStart(5)
  return [
    keyOf(row, row.engine),
    `${row.seconds.toFixed(2).padStart(6)} s (${row.minSeconds.toFixed(2)}–${row.maxSeconds.toFixed(2)})`,
    `then ${row.restSeconds.toFixed(2).padStart(5)} s`,
    `anonymous ${megabytes(row.peakAnonBytes)} MB (before ${megabytes(row.startAnonBytes)})`,
    `pss ${megabytes(row.peakPssBytes)} MB (all ranks ${megabytes(row.totalPssBytes)})`,
    `read ${megabytes(row.readBytes)} MB for a shard of ${megabytes(row.shardBytes)}`,
    `storage ${megabytes(row.storageBytes)} MB`,
  ].join('  ')
}

/** How many times more each full load takes than the sharded one, and diffusers than Rankwise in the same way. */
export function formatRatios(rows: readonly Row[]): readonly string[] {
  const fullOverSharded = rows
    .filter(({ mode }) => mode === 'full')
    .map((row) => ratioLine(keyOf(row, `${row.engine} full / sharded`), row, find(rows, { ...row, mode: 'sharded' })))
  const peerOverOurs = rows
    .filter(({ engine }) => engine === 'diffusers')
    .map((row) => ratioLine(keyOf(row, 'diffusers / rankwise'), row, find(rows, { ...row, engine: 'rankwise' })))
  return [...fullOverSharded, ...peerOverOurs]
}

function find(rows: readonly Row[], key: Pick<Row, 'tp' | 'mode' | 'cache' | 'engine'>): Row {
  return rows.find(
    ({ tp, mode, cache, engine }) => tp === key.tp && mode === key.mode && cache === key.cache && engine === key.engine,
  ) as Row
}

function ratioLine(title: string, row: Row, base: Row): string {
  const factor = (a: number, b: number) => `${(a / b).toFixed(2).padStart(6)}x`
  const times = (field: 'seconds' | 'peakAnonBytes' | 'peakPssBytes' | 'totalPssBytes') =>
    factor(row[field], base[field])
  return [
    title,
    `seconds ${times('seconds')}`,
    `with the rest ${factor(row.seconds + row.restSeconds, base.seconds + base.restSeconds)}`,
    `anonymous ${times('peakAnonBytes')}`,
    `pss ${times('peakPssBytes')}`,
    `pss of all ranks ${times('totalPssBytes')}`,
  ].join('  ')
}

function keyOf({ tp, mode, cache }: Row, what: string): string {
  return `tp ${tp} ${mode.padEnd(7)} ${cache} ${what.padEnd(9)}`
}

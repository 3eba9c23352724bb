import type { GraphProfile } from '@rankwise/core'
import { megabytes } from './progress.ts'

/** Bytes of the transformer's weights, in the dtypes of the checkpoint. */
export interface RankWeights {
  readonly fullBytes: number
  readonly ranks: readonly {
    readonly rank: number
    readonly localBytes: number
    /** Read into memory of the rank. */
    readonly readBytes: number
    /** Left in the mapped file, which the ranks of a machine share. */
    readonly mappedBytes: number
    /** Most memory that the rank took for itself, mapped files not counted; null where the system does not tell. */
    readonly peakAnonBytes: number | null
  }[]
}

/** What a generation did; `rankwise generate --json` prints it as it is. */
export interface GenerationSummary {
  readonly out: string
  readonly prompt: string
  /** Decimal, since seeds go beyond 2^53. */
  readonly seed: string
  readonly height: number
  readonly width: number
  readonly backend: string
  /** What the transformer computes in. */
  readonly dtype: string
  readonly ranks: number
  readonly seconds: { readonly load: number; readonly draw: number }
  readonly transformer: RankWeights
  /** Where the time of each rank went, for every model that ran; only with `--profile`. */
  readonly profile?: readonly (readonly GraphProfile[])[] | undefined
}

/** The summary for people. */
export function formatSummary(summary: GenerationSummary): string {
  const { out, width, height, backend, dtype, ranks, seconds, transformer, profile = [] } = summary
  const { fullBytes } = transformer
  const shares = transformer.ranks.map(({ rank, localBytes, readBytes, mappedBytes, peakAnonBytes }) => {
    const share = ((100 * localBytes) / fullBytes).toFixed(1)
    const peak = peakAnonBytes === null ? '' : `; at most ${megabytes(peakAnonBytes)} MB of anonymous memory`
    return `  rank ${rank}: ${megabytes(localBytes)} of ${megabytes(fullBytes)} MB transformer weights (${share} %), ${megabytes(readBytes)} MB read, ${megabytes(mappedBytes)} MB mapped${peak}`
  })
  return [
    `${out}: ${width} x ${height} pixels on ${ranks} ${ranks === 1 ? 'rank' : 'ranks'} (${backend}, ${dtype})`,
    `  loaded in ${seconds.load.toFixed(2)} s, drawn in ${seconds.draw.toFixed(2)} s`,
    ...shares,
    ...profile.flatMap((graphs, rank) => graphs.map((graph) => `  rank ${rank}: ${formatProfile(graph)}`)),
  ].join('\n')
}

function formatProfile(profile: GraphProfile): string {
  const { graph, runs, seconds, compileSeconds, segmentSeconds, allReduceSeconds, allReduces, allReduceBytes, flops } =
    profile
  const share = (part: number) => `${((100 * part) / seconds).toFixed(1)} %`
  const each = runs === 1 ? '1 run' : `${runs} runs`
  const exchanged = allReduces === 0 ? '' : ` of ${allReduces} (${megabytes(allReduceBytes)} MB)`
  return [
    `${graph}: ${each}, ${seconds.toFixed(2)} s`,
    `${share(segmentSeconds)} computing (${(flops / segmentSeconds / 1e9).toFixed(1)} GFLOP/s)`,
    `${share(allReduceSeconds)} in all-reduces${exchanged}`,
    `compiled in ${compileSeconds.toFixed(2)} s`,
  ].join(', ')
}

// How long it takes to load FLUX.2-klein-4B widths on 1, 2 and 4 ranks, and what memory it takes: `pnpm bench:load`.
import { spawnSync } from 'node:child_process'
import { writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { Command, InvalidArgumentError } from 'commander'
import { type Blocks, makeCheckpoint } from './klein-checkpoint.ts'
import { type LoadResult, measureLoad } from './measure.ts'

interface Options {
  readonly layers: Blocks
  readonly directory: string
  readonly repeat: number
  readonly tp: readonly number[]
  readonly json?: string
}

interface Row extends LoadResult {
  readonly tp: number
  readonly mode: 'sharded' | 'full'
  readonly cache: 'warm' | 'cold'
  readonly engine: 'rankwise'
}

const MODES = ['sharded', 'full'] as const
const CACHES = ['warm', 'cold'] as const

function blocks(text: string): Blocks {
  const [, double, single] = /^(\d+)\+(\d+)$/.exec(text) ?? []
  if (double === undefined || single === undefined) throw new InvalidArgumentError('It is like 2+4.')
  return { double: Number(double), single: Number(single) }
}

const options = new Command('bench:load')
  .option('--layers <double+single>', 'blocks; the real model has 5+20', blocks, { double: 2, single: 4 })
  .option('--directory <folder>', 'where the checkpoint is kept', join(tmpdir(), 'rankwise-benchmarks'))
  .option('--repeat <n>', 'loads per row, of which the median counts', Number, 3)
  .option('--tp <degrees>', 'degrees, with commas', (text) => text.split(',').map(Number), [1, 2, 4])
  .option('--json <file>', 'write the rows to a file')
  .parse()
  .opts<Options>()

const { double, single } = options.layers
const folder = join(options.directory, `klein-4b-${double}+${single}`)
const bytes = await makeCheckpoint(folder, options.layers)
console.log(`${folder}: ${(bytes / 1e9).toFixed(2)} GB of bfloat16, ${double} double and ${single} single blocks`)

const rows: Row[] = []
for (const tp of options.tp) {
  for (const mode of MODES) {
    for (const cache of CACHES) {
      const results: LoadResult[] = []
      for (let i = 0; i < options.repeat; i++) {
        setCache(cache)
        results.push(await measureLoad(new URL('rank.ts', import.meta.url), [folder, mode], tp))
      }
      rows.push({ tp, mode, cache, engine: 'rankwise', ...median(results) })
      console.log(format(rows.at(-1) as Row))
    }
  }
}
if (options.json !== undefined) await writeFile(options.json, `${JSON.stringify(rows, null, 2)}\n`)

/** Reads the file into the page cache, or drops its pages. */
function setCache(cache: Row['cache']): void {
  const file = join(folder, 'diffusion_pytorch_model.safetensors')
  const args = cache === 'warm' ? [`if=${file}`, 'of=/dev/null', 'bs=16M'] : [`if=${file}`, 'iflag=nocache', 'count=0']
  const { status, stderr } = spawnSync('dd', args)
  if (status !== 0) throw new Error(`the page cache cannot be ${cache}: ${stderr}`)
}

/** The run of median time; its memory is that of the worst run. */
function median(results: readonly LoadResult[]): LoadResult {
  const sorted = [...results].sort((a, b) => a.seconds - b.seconds)
  const middle = sorted[Math.floor(sorted.length / 2)] as LoadResult
  const worst = (field: 'peakAnonBytes' | 'peakPssBytes' | 'totalPssBytes') => Math.max(...results.map((r) => r[field]))
  return {
    ...middle,
    peakAnonBytes: worst('peakAnonBytes'),
    peakPssBytes: worst('peakPssBytes'),
    totalPssBytes: worst('totalPssBytes'),
  }
}

function format(row: Row): string {
  const megabytes = (value: number) => `${(value / 1e6).toFixed(0).padStart(5)} MB`
  return [
    `tp ${row.tp} ${row.mode.padEnd(7)} ${row.cache}`,
    `${row.seconds.toFixed(2).padStart(6)} s`,
    `anonymous ${megabytes(row.peakAnonBytes)}`,
    `pss ${megabytes(row.peakPssBytes)} (all ranks ${megabytes(row.totalPssBytes)})`,
    `read ${megabytes(row.readBytes)} for a shard of ${megabytes(row.shardBytes)}`,
  ].join('  ')
}

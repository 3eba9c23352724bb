// How long it takes to load FLUX.2-klein-4B widths on 1, 2 and 4 ranks, and what memory it takes: `pnpm bench:load`.
import { writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { Command, InvalidArgumentError, Option } from 'commander'
import { makeCheckpoint } from '../klein-checkpoint.ts'
import type { Blocks } from '../klein-config.ts'
import { positiveInteger, positiveIntegers } from '../parse-options.ts'
import { type Engine, findDiffusers, rankwise } from './engine.ts'
import { measureLoad } from './measure.ts'
import { secondsToRead, setPageCache } from './page-cache.ts'
import { type CachedLoadResult, formatRatios, formatRow, type Row, rowOf } from './row.ts'

interface Options {
  readonly layers: Blocks
  readonly directory: string
  readonly repeat: number
  readonly tp: readonly number[]
  readonly json?: string
  readonly peer?: boolean
  readonly python: string
}

const MODES = ['sharded', 'full'] as const
const CACHES = ['warm', 'cold'] as const

const program = new Command('bench:load')
  .option('--layers <double+single>', 'blocks; the real model has 5+20', blocks, { double: 2, single: 4 })
  .option('--directory <folder>', 'where the checkpoint is kept', join(tmpdir(), 'rankwise-benchmarks'))
  .option('--repeat <n>', 'loads per row, of which the median counts', positiveInteger, 3)
  .option('--tp <degrees>', 'degrees, with commas', positiveIntegers, [1, 2, 4])
  .option('--json <file>', 'write the rows to a file')
  .option('--peer', 'load with diffusers as well')
  .addOption(new Option('--python <path>', 'the Python that has diffusers').default('python3').implies({ peer: true }))
  .parse()
const options = program.opts<Options>()

const engines = options.peer ? [rankwise, peer()] : [rankwise]
const { double, single } = options.layers
const folder = join(options.directory, `klein-4b-${double}+${single}`)
const file = join(folder, 'diffusion_pytorch_model.safetensors')
const bytes = await makeCheckpoint(folder, options.layers)
console.log(`${folder}: ${(bytes / 1e9).toFixed(2)} GB of bfloat16, ${double} double and ${single} single blocks`)

const rows: Row[] = []
for (const tp of options.tp) {
  for (const mode of MODES) {
    for (const cache of CACHES) {
      for (const row of await measure({ tp, mode, cache })) {
        rows.push(row)
        console.log(formatRow(row))
      }
    }
  }
}
console.log()
for (const line of formatRatios(rows)) console.log(line)
if (options.json !== undefined) await writeFile(options.json, `${JSON.stringify(rows, null, 2)}\n`)

/** Engines take turns, so that a machine that slows down does so for all of them. */
async function measure(way: Pick<Row, 'tp' | 'mode' | 'cache'>): Promise<readonly Row[]> {
  const results = engines.map((): CachedLoadResult[] => [])
  for (let i = 0; i < options.repeat; i++) {
    for (const [e, engine] of engines.entries()) {
      await setPageCache(file, way.cache)
      const result = await measureLoad(engine.command(folder, way.mode), way.tp)
      results[e]?.push({ ...result, restSeconds: secondsToRead(file) })
    }
  }
  const measured = engines.map(({ name }, e) => rowOf({ ...way, engine: name }, results[e] as CachedLoadResult[]))
  const shards = new Set(measured.map(({ shardBytes }) => shardBytes))
  if (shards.size > 1) throw new Error(`engines do not split alike: shards of ${[...shards].join(' and ')} bytes`)
  return measured
}

function peer(): Engine {
  const found = findDiffusers(options.python)
  if ('missing' in found) {
    return program.error(
      `--peer: ${found.missing}. Name a Python that has them with --python: pip install torch 'diffusers>=0.42' accelerate`,
      { exitCode: 2 },
    )
  }
  console.log(`peer: ${found.versions}`)
  return found.engine
}

function blocks(text: string): Blocks {
  const [, double, single] = /^(\d+)\+(\d+)$/.exec(text) ?? []
  if (double === undefined || single === undefined) throw new InvalidArgumentError('It is like 2+4.')
  return { double: Number(double), single: Number(single) }
}

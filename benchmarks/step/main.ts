// How long a step of FLUX.2-klein-4B's transformer takes on every backend and with diffusers, and where the time goes:
// `pnpm bench:step`.
import { writeFile } from 'node:fs/promises'
import { availableParallelism, tmpdir } from 'node:os'
import { join } from 'node:path'
import { Command, InvalidArgumentError } from 'commander'
import { findEngines } from '../find-engines.ts'
import { makeCheckpoint } from '../klein-checkpoint.ts'
import { type Blocks, kleinConfig } from '../klein-config.ts'
import { degrees, namesOf, positiveInteger, positiveIntegers } from '../parse-options.ts'
import { chartPage } from './chart.ts'
import { ENGINE_NAMES, type EngineName, findEngine } from './engine.ts'
import { STEP_DTYPES, type StepCase, type StepDType, type Tokens } from './job.ts'
import { measureCase } from './measure-case.ts'
import { measurePeak } from './peak.ts'
import { formatRatios, formatRow, type Row } from './row.ts'
import { stepFlops } from './step-flops.ts'

interface Options {
  readonly engines: readonly EngineName[]
  readonly dtypes: readonly StepDType[]
  readonly tokens: readonly Tokens[]
  readonly tp: readonly number[]
  readonly threads: readonly number[]
  readonly repeat: number
  readonly steps: number
  readonly pinThreads?: boolean
  readonly full?: boolean
  readonly directory: string
  readonly json?: string
  readonly chart?: string
  readonly trace?: string
}

const SIZES = '256+512,1024+512'

const program = new Command('bench:step')
  .option('--engines <names>', 'what computes; by default all that are here', namesOf(ENGINE_NAMES), ENGINE_NAMES)
  .option('--dtypes <names>', 'what is computed in', namesOf(STEP_DTYPES), STEP_DTYPES)
  .option(
    '--tokens <image+text>',
    'tokens, several with commas; of the image a square',
    tokenCounts,
    tokenCounts(SIZES),
  )
  .option('--tp <degrees>', 'ranks', degrees, [1, 2, 4])
  .option('--threads <numbers>', 'threads of each rank', positiveIntegers, [1])
  .option('--repeat <n>', 'rounds, in which engines take turns', positiveInteger, 3)
  .option('--steps <n>', 'steps of a round, at most a minute', positiveInteger, 3)
  .option('--pin-threads', 'keep every thread of ort capi on a processor of its own')
  .option('--full', 'all 5+20 blocks instead of 2+4')
  .option('--directory <folder>', 'where the checkpoint is kept', join(tmpdir(), 'rankwise-benchmarks'))
  .option('--json <file>', 'write the rows to a file')
  .option('--chart <file>', 'write a page with a chart')
  .option('--trace <file>', 'write a trace of the last case of the first engine, for ui.perfetto.dev')
  .option('--python <path>', 'the Python that has torch and diffusers', 'python3')
  .parse()
const options = program.opts<Options>()
const engines = await findEngines({ program, option: 'engines', names: options.engines, find: findEngine })

const interrupted = new AbortController()
for (const signal of ['SIGINT', 'SIGTERM'] as const) {
  process.once(signal, () => interrupted.abort(new Error(`stopped by ${signal}`)))
}

const layers: Blocks = options.full ? { double: 5, single: 20 } : { double: 2, single: 4 }
const title = `A step of ${layers.double}+${layers.single} blocks of FLUX.2-klein-4B`
const folder = join(options.directory, `klein-4b-${layers.double}+${layers.single}`)
await makeCheckpoint(folder, layers)
const peak = measurePeak()
const measured =
  peak === undefined ? 'unknown, without a C compiler' : `float32 ${peak.float32}, bfloat16 ${peak.bfloat16} GFLOP/s`
console.log(`${title}; ${availableParallelism()} cores; peak of a core: ${measured}\n`)

const rows: Row[] = []
for (const stepCase of cases()) {
  const onRound = (round: number, what: string) => console.error(`round ${round} of ${options.repeat}: ${what}`)
  const flops = stepFlops(kleinConfig(layers), stepCase.tokens)
  const { repeat, steps, pinThreads = false, trace } = options
  const how = { engines, repeat, steps, pinThreads, folder, flops, peak, trace, signal: interrupted.signal, onRound }
  for (const row of await measureCase(stepCase, how)) {
    rows.push(row)
    console.log(formatRow(row))
  }
}
console.log()
for (const line of formatRatios(rows)) console.log(line)
if (options.json !== undefined) await writeFile(options.json, `${JSON.stringify(rows, null, 2)}\n`)
if (options.chart !== undefined) await writeFile(options.chart, chartPage(rows, title))

function cases(): readonly StepCase[] {
  const { dtypes, tokens, tp, threads } = options
  return dtypes.flatMap((dtype) =>
    tokens.flatMap((count) =>
      tp.flatMap((degree) => threads.map((each) => ({ dtype, tokens: count, tp: degree, threads: each }))),
    ),
  )
}

function tokenCounts(text: string): readonly Tokens[] {
  return text.split(',').map((pair) => {
    const [, image, words] = /^(\d+)\+(\d+)$/.exec(pair) ?? []
    const tokens = { image: Number(image), text: Number(words) }
    if (Number.isInteger(Math.sqrt(tokens.image)) && tokens.image > 0 && tokens.text > 0) return tokens
    throw new InvalidArgumentError('It is like 256+512, with a square of image tokens.')
  })
}

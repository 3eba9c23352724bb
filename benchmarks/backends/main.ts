// How long a FLUX.2 block takes on every backend and with torch, and how exact it is: `pnpm bench:backends`.
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { availableParallelism, tmpdir } from 'node:os'
import { join } from 'node:path'
import { Command, InvalidArgumentError } from 'commander'
import { findEngines } from '../find-engines.ts'
import { kleinConfig } from '../klein-config.ts'
import { degrees, namesOf, positiveInteger, positiveIntegers } from '../parse-options.ts'
import { makeFiles } from './block-files.ts'
import { ENGINE_NAMES, type EngineName, findEngine } from './engine.ts'
import { expectedResults } from './expected.ts'
import { BLOCK_DTYPES, BLOCK_KINDS, type BlockCase, type BlockDType, type BlockKind } from './job.ts'
import { measureCase } from './measure-case.ts'
import { formatRatios, formatRow, type Row } from './row.ts'

interface Options {
  readonly backends: readonly EngineName[]
  readonly blocks: readonly BlockKind[]
  readonly tokens: readonly number[]
  readonly tp: readonly number[]
  readonly threads: readonly number[]
  readonly dtypes: readonly BlockDType[]
  readonly repeat: number
  readonly directory: string
  readonly json?: string
}

const program = new Command('bench:backends')
  .option('--backends <names>', 'what computes, with commas', namesOf(ENGINE_NAMES), ENGINE_NAMES)
  .option('--blocks <kinds>', 'kinds of blocks', namesOf(BLOCK_KINDS), BLOCK_KINDS)
  .option('--tokens <numbers>', 'tokens, a third of them text', tokenCounts, [768])
  .option('--tp <degrees>', 'degrees; rank 0 is run', degrees, [1, 2])
  .option('--threads <numbers>', 'threads of the process', positiveIntegers, [1])
  .option('--dtypes <names>', 'what weights are kept in', namesOf(BLOCK_DTYPES), BLOCK_DTYPES)
  .option('--repeat <n>', 'rounds, in which engines take turns', positiveInteger, 3)
  .option('--directory <folder>', 'where weights are kept', join(tmpdir(), 'rankwise-benchmarks'))
  .option('--json <file>', 'write the rows to a file')
  .option('--python <path>', 'the Python that has torch and diffusers', 'python3')
  .parse()
const options = program.opts<Options>()
const engines = await findEngines({ program, option: 'backends', names: options.backends, find: findEngine })

const interrupted = new AbortController()
for (const signal of ['SIGINT', 'SIGTERM'] as const) {
  process.once(signal, () => interrupted.abort(new Error(`stopped by ${signal}`)))
}

const folder = join(options.directory, 'klein-4b-blocks')
const temporary = await mkdtemp(join(tmpdir(), 'rankwise-backends-'))
try {
  console.log(`${availableParallelism()} cores\n`)
  const rows: Row[] = []
  for (const blockCase of cases()) {
    const expected = await prepare(blockCase)
    for (const threads of options.threads) {
      const { dtypes, repeat } = options
      const onProcess = (round: number, what: string) => console.error(`round ${round} of ${repeat}: ${what}`)
      const how = {
        engines,
        dtypes,
        threads,
        repeat,
        folder,
        temporary,
        expected,
        signal: interrupted.signal,
        onProcess,
      }
      for (const row of await measureCase(blockCase, how)) {
        rows.push(row)
        console.log(formatRow(row))
      }
    }
  }
  console.log()
  for (const line of formatRatios(rows)) console.log(line)
  if (options.json !== undefined) await writeFile(options.json, `${JSON.stringify(rows, null, 2)}\n`)
} finally {
  await rm(temporary, { recursive: true })
}

function cases(): readonly BlockCase[] {
  const { blocks, tokens, tp } = options
  return tp.flatMap((degree) =>
    blocks.flatMap((block) => tokens.map((count) => ({ block, tokens: count, tp: degree }))),
  )
}

async function prepare(blockCase: BlockCase) {
  await makeFiles(folder, kleinConfig({ double: 1, single: 1 }), blockCase)
  const torch = engines.find(({ name }) => name === 'torch')
  return expectedResults(folder, blockCase, torch, interrupted.signal)
}

function tokenCounts(text: string): readonly number[] {
  const counts = positiveIntegers(text)
  if (counts.every((count) => count % 3 === 0)) return counts
  throw new InvalidArgumentError('It is a multiple of 3: a third is text.')
}

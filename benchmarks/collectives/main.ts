// How long an all-reduce takes on 2 and 4 ranks, here and with gloo and Open MPI: `pnpm bench:collectives`.
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { availableParallelism, tmpdir } from 'node:os'
import { join } from 'node:path'
import { Command, InvalidArgumentError } from 'commander'
import { positiveInteger, positiveIntegers } from '../parse-options.ts'
import type { Engine, Found } from './engine.ts'
import { findGloo } from './gloo.ts'
import { measure } from './measure.ts'
import { findOpenMpi } from './openmpi.ts'
import { planOf, SIZES } from './plan.ts'
import { findInArena, findLocal, findMpi, findTcp } from './rankwise.ts'
import { formatRatios, formatRow, type Row, rowOf } from './row.ts'

interface Options {
  readonly ranks: readonly number[]
  readonly bytes: readonly number[]
  readonly repeat: number
  readonly json?: string
  readonly python: string
}

const program = new Command('bench:collectives')
  .option('--ranks <numbers>', 'numbers of ranks, 2 or 4', rankCounts, [2, 4])
  .option('--bytes <sizes>', 'sizes of a tensor, with commas', sizes, SIZES)
  .option('--repeat <n>', 'rounds, in which engines take turns', positiveInteger, 3)
  .option('--json <file>', 'write the rows to a file')
  .option('--python <path>', 'the Python that has torch', 'python3')
  .parse()
const options = program.opts<Options>()
const plans = options.bytes.map(planOf)
const gloo = findGloo(options.python)
if ('missing' in gloo && program.getOptionValueSource('python') === 'cli') {
  program.error(`--python: ${gloo.missing}`, { exitCode: 2 })
}

const interrupted = new AbortController()
for (const signal of ['SIGINT', 'SIGTERM'] as const) {
  process.once(signal, () => interrupted.abort(new Error(`stopped by ${signal}`)))
}

const folder = await mkdtemp(join(tmpdir(), 'rankwise-collectives-'))
try {
  const engines = await findEngines()
  console.log(`${availableParallelism()} cores\n`)
  const rows: Row[] = []
  for (const ranks of options.ranks) {
    for (const row of await measureAll(engines, ranks)) {
      rows.push(row)
      console.log(formatRow(row))
    }
  }
  for (const line of formatRatios(rows)) console.log(line)
  if (options.json !== undefined) await writeFile(options.json, `${JSON.stringify(rows, null, 2)}\n`)
} finally {
  await rm(folder, { recursive: true })
}

async function findEngines(): Promise<readonly Engine[]> {
  const found: Record<string, Found> = {
    'rankwise local': await findLocal(),
    'rankwise in-arena': await findInArena(),
    'rankwise tcp': await findTcp(),
    'rankwise mpi': findMpi(),
    gloo,
    openmpi: findOpenMpi(folder),
  }
  return Object.entries(found).flatMap(([name, result]) => {
    console.log(`${name}: ${'missing' in result ? `skipped, ${result.missing}` : result.about}`)
    return 'missing' in result ? [] : result.engines
  })
}

/** Engines take turns, so that a machine that slows down does so for all of them. Sorted by size. */
async function measureAll(engines: readonly Engine[], ranks: number): Promise<readonly Row[]> {
  const batches = engines.map(() => new Map<number, readonly number[]>())
  for (let i = 0; i < options.repeat; i++) {
    for (const [e, engine] of engines.entries()) {
      const own = plans.filter(({ bytes }) => bytes >= (engine.leastBytes ?? 0))
      if (own.length === 0) continue
      const all = batches[e] as Map<number, readonly number[]>
      console.error(`round ${i + 1} of ${options.repeat} on ${ranks} ranks: ${engine.name}`)
      const times = await measure(engine, ranks, own, interrupted.signal)
      for (const [bytes, more] of times) all.set(bytes, [...(all.get(bytes) ?? []), ...more])
    }
  }
  return plans.flatMap(({ bytes }) =>
    engines.flatMap(({ name }, e) => {
      const times = batches[e]?.get(bytes)
      return times === undefined ? [] : [rowOf({ engine: name, ranks, bytes }, times)]
    }),
  )
}

function rankCounts(text: string): readonly number[] {
  const counts = positiveIntegers(text)
  // Only then are repeated sums exact; see pattern.ts.
  if (counts.every((count) => count === 2 || count === 4)) return counts
  throw new InvalidArgumentError('It is 2, 4 or both.')
}

function sizes(text: string): readonly number[] {
  const bytes = positiveIntegers(text)
  if (bytes.every((size) => size % Float32Array.BYTES_PER_ELEMENT === 0)) return bytes
  throw new InvalidArgumentError('A float32 takes 4 bytes.')
}

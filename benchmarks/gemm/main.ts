// How fast the matrix multiply of backend-ort is, for weights in bfloat16: `pnpm bench:gemm`.
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { Command, InvalidArgumentError } from 'commander'
import { positiveInteger } from '../parse-options.ts'
import { askPython } from '../python.ts'
import { type Bench, compileBench, torchBench } from './bench.ts'
import { formatRow, type Row } from './row.ts'

type Shape = readonly [m: number, n: number, k: number]

interface Options {
  readonly shapes: readonly Shape[]
  readonly threads: number
  readonly repeat: number
  readonly python: string
  readonly json?: string
}

const SHAPES = '1x27648x3072,16x27648x3072,64x3072x12288,768x27648x3072,768x3072x12288'

const program = new Command('bench:gemm')
  .option('--shapes <shapes>', 'MxNxK, with commas', shapes, shapes(SHAPES))
  .option('--threads <n>', 'threads that share a product', positiveInteger, 1)
  .option('--repeat <n>', 'products per row', positiveInteger, 9)
  .option('--python <path>', 'the Python that has torch', 'python3')
  .option('--json <file>', 'write the rows to a file')
  .parse()
const options = program.opts<Options>()

const folder = await mkdtemp(join(tmpdir(), 'rankwise-gemm-'))
try {
  const benches: Bench[] = [await compileBench(folder)]
  const torch = askPython(options.python, 'import torch; print(f"torch {torch.__version__}")', 'torch')
  if ('output' in torch) benches.push(torchBench(options.python))
  else if (program.getOptionValueSource('python') === 'cli')
    program.error(`--python: ${torch.missing}`, { exitCode: 2 })
  console.log('missing' in torch ? `torch: skipped, ${torch.missing}` : torch.output)
  const rows: Row[] = []
  for (const [m, n, k] of options.shapes) {
    for (const bench of benches) {
      for (const times of bench(m, n, k, options.threads, options.repeat)) {
        const row = { m, n, k, threads: options.threads, ...times }
        rows.push(row)
        console.log(formatRow(row))
      }
    }
  }
  if (options.json !== undefined) await writeFile(options.json, `${JSON.stringify(rows, null, 2)}\n`)
} finally {
  await rm(folder, { recursive: true })
}

function shapes(text: string): readonly Shape[] {
  return text.split(',').map((shape) => {
    const numbers = shape.split('x').map(positiveInteger)
    if (numbers.length !== 3) throw new InvalidArgumentError('A shape is MxNxK.')
    return numbers as unknown as Shape
  })
}

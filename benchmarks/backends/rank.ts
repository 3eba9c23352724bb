// One process that runs a block on a backend of Rankwise: started by main.ts, as torch-rank.py is.
import { writeSync } from 'node:fs'
import { ort } from '@rankwise/backend-ort'
import { tfjs } from '@rankwise/backend-tfjs'
import { type Backend, writeSafetensors } from '@rankwise/core'
import { ReferenceBackend } from '@rankwise/core/reference'
import { BlockRun } from './block-run.ts'
import type { Job, Limit } from './job.ts'

const REPORT_DESCRIPTOR = 3

const job: Job = JSON.parse(process.argv[2] as string)
await using backend = await backendOf(job)
const block = await BlockRun.load(job.folder, job, backend)
if (job.timing === undefined) {
  await block.run()
} else {
  await timesOf(block, job.timing.warmUp)
  writeSync(REPORT_DESCRIPTOR, 'warm\n')
  // Its memory is no longer looked at, which would cost time, when an answer comes.
  for await (const _ of process.stdin) break
  writeSync(REPORT_DESCRIPTOR, `${JSON.stringify(await timesOf(block, job.timing.timed))}\n`)
}
await writeSafetensors(job.output, await block.results())

/** Milliseconds of every run. */
async function timesOf(run: BlockRun, { seconds, most }: Limit): Promise<readonly number[]> {
  const times: number[] = []
  const end = performance.now() + 1000 * seconds
  do {
    const started = performance.now()
    await run.run()
    times.push(performance.now() - started)
  } while (times.length < most && performance.now() < end)
  return times
}

async function backendOf({ backend: name, dtype, threads }: Job): Promise<Backend> {
  if (name === 'ort') return ort({ device: 'cpu', threads })
  if (name === 'reference') return new ReferenceBackend()
  if (name === 'tfjs-wasm') return tfjs({ engine: 'wasm', threads })
  const float32MatmulPrecision = dtype === 'bfloat16' ? 'medium' : 'highest'
  const native = await tfjs({ engine: 'native', threads, float32MatmulPrecision })
  if (native.selection.float32MatmulPrecision === float32MatmulPrecision) return native
  throw new Error('the native engine does not multiply in bfloat16 here')
}

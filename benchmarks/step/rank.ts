// One rank that runs steps of the transformer on a backend of Rankwise: started by main.ts, as diffusers-rank.py is.
import '@rankwise/collectives-local'
import { writeFileSync, writeSync } from 'node:fs'
import { monitorEventLoopDelay } from 'node:perf_hooks'
import { ort } from '@rankwise/backend-ort'
import { tfjs } from '@rankwise/backend-tfjs'
import {
  type Backend,
  chromeTrace,
  gatherProfile,
  initProcessGroup,
  Profiler,
  profileSummary,
  Tensor,
  TensorParallelConfig,
} from '@rankwise/core'
import { Flux2Transformer2DModel } from '@rankwise/models-flux2'
import type { Job, Limit, StepReport } from './job.ts'
import { stepInputs } from './step-inputs.ts'

const REPORT_DESCRIPTOR = 3

const job: Job = JSON.parse(process.argv[2] as string)
await using group = await initProcessGroup({ backend: 'local' })
await using backend = await backendOf(job)
const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
await using model = await Flux2Transformer2DModel.fromPretrained(job.folder, {
  backend,
  dtype: job.dtype,
  parallelConfig,
})
const inputs = stepInputs(model.config, job)

await timesOf(job.warmUp)
writeSync(REPORT_DESCRIPTOR, 'warm\n')
// Memory is no longer looked at, which would cost time, when an answer comes.
for await (const _ of process.stdin) break
const profiler = new Profiler()
const seconds = await timesOf(job.timed)
profiler.stop()
const eventLoopMilliseconds = await eventLoopHeld(job.watched)
const [profile] = profileSummary(profiler.events)
const report: StepReport = {
  seconds,
  allReduceSeconds: profile?.allReduceSeconds ?? 0,
  readBytes: model.loadReport.readBytes,
  eventLoopMilliseconds,
}
if (job.trace !== undefined) {
  const ranks = await gatherProfile(profiler.events, group.collectives)
  if (group.rank === 0) writeFileSync(job.trace, JSON.stringify(chromeTrace(ranks)))
}
writeSync(REPORT_DESCRIPTOR, `${JSON.stringify(report)}\n`)

/** Seconds of every step. The ranks stop together: rank 0 says when. */
async function timesOf({ seconds, most }: Limit): Promise<readonly number[]> {
  const times: number[] = []
  const end = performance.now() + 1000 * seconds
  do {
    const started = performance.now()
    await model.run(inputs)
    times.push((performance.now() - started) / 1000)
  } while (times.length < most && (await goesOn(performance.now() < end)))
  return times
}

/** A thousand looks a second take 3 % of a core: the steps that count go without. */
async function eventLoopHeld(limit: Limit): Promise<number> {
  const delay = monitorEventLoopDelay({ resolution: 1 })
  delay.enable()
  await timesOf(limit)
  delay.disable()
  return delay.max / 1e6
}

async function goesOn(wanted: boolean): Promise<boolean> {
  const answer = Tensor.int32([1], [wanted ? 1 : 0])
  await group.collectives.broadcast(answer, { source: 0 })
  return answer.data[0] === 1
}

async function backendOf({ backend: name, engine, threads, pinThreads }: Job): Promise<Backend> {
  if (name === 'ort') return ort({ device: 'cpu', engine: engine as 'capi' | 'binding', threads, pinThreads })
  return tfjs({ engine: engine as 'native' | 'wasm', threads })
}

// One rank of a load: started by main.ts, reports through its IPC channel and waits to be measured.
import '@rankwise/collectives-local'
import { ort } from '@rankwise/backend-ort'
import { initProcessGroup, TensorParallelConfig } from '@rankwise/core'
import { Flux2Transformer2DModel } from '@rankwise/models-flux2'
import type { RankReport } from './measure.ts'

const [directory, mode] = process.argv.slice(2) as [string, 'sharded' | 'full']

await using group = await initProcessGroup({ backend: 'local' })
const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
// `full` is how a model is split that was built in memory: all of it, then the slices.
await using backend = await ort({ device: 'cpu', threads: 1, weights: mode === 'full' ? 'read' : 'auto' })
await group.collectives.barrier()
const started = performance.now()
const model =
  mode === 'sharded'
    ? await Flux2Transformer2DModel.fromPretrained(directory, { backend, parallelConfig })
    : await Flux2Transformer2DModel.fromPretrained(directory, { backend })
if (mode === 'full') await model.enableParallelism(parallelConfig)
await group.collectives.barrier()
const seconds = (performance.now() - started) / 1000
const { localBytes, readBytes, mappedBytes } = model.loadReport
const report: RankReport = { seconds, shardBytes: localBytes, readBytes: readBytes + mappedBytes }
await new Promise((resolve) => process.send?.(report, undefined, {}, resolve))
await model.dispose()
process.disconnect()

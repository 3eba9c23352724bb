// One rank of a load: started by main.ts.
import '@rankwise/collectives-local'
import { ort } from '@rankwise/backend-ort'
import { initProcessGroup, TensorParallelConfig } from '@rankwise/core'
import { Flux2Transformer2DModel } from '@rankwise/models-flux2'
import { memoryOf } from '../memory-sampler.ts'
import { report, storageBytes } from './rank-report.ts'

const [directory, mode] = process.argv.slice(2) as [string, 'sharded' | 'full']

await using group = await initProcessGroup({ backend: 'local' })
const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
// `full` is how a model is split that was built in memory: all of it, then the slices.
await using backend = await ort({ device: 'cpu', threads: 1, weights: mode === 'full' ? 'read' : 'auto' })
const { anonBytes: startAnonBytes } = memoryOf('self')
await group.collectives.barrier()
const storageBefore = storageBytes()
const started = performance.now()
const model =
  mode === 'sharded'
    ? await Flux2Transformer2DModel.fromPretrained(directory, { backend, parallelConfig })
    : await Flux2Transformer2DModel.fromPretrained(directory, { backend })
if (mode === 'full') await model.enableParallelism(parallelConfig)
await group.collectives.barrier()
const seconds = (performance.now() - started) / 1000
const { localBytes, readBytes, mappedBytes } = model.loadReport
await report({
  seconds,
  shardBytes: localBytes,
  readBytes: readBytes + mappedBytes,
  storageBytes: storageBytes() - storageBefore,
  startAnonBytes,
})
await model.dispose()

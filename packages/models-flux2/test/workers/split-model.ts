import '@rankwise/collectives-local'
import { ort } from '@rankwise/backend-ort'
import { initProcessGroup, type LoadReport, type MemoryReport, TensorParallelConfig } from '@rankwise/core'
import { loadGolden, referencePath, runRank } from '@rankwise/fixtures'
import { Flux2Transformer2DModel } from '../../src/index.ts'
import { transformerInputs } from '../golden-inputs.ts'

export interface SplitModelResult {
  /** Output of the model loaded split. */
  readonly sharded: Float32Array
  /** Output of the model that was loaded whole and split then. */
  readonly split: Float32Array
  /** Weights of the whole model, then after splitting it. */
  readonly memory: readonly [whole: MemoryReport, split: MemoryReport]
  /** What the split model reports, and what the one that was loaded split does. */
  readonly reports: readonly [split: LoadReport, sharded: LoadReport]
}

/** Both ways to a split model, on this rank. */
runRank(async (golden: string): Promise<SplitModelResult> => {
  await using group = await initProcessGroup({ backend: 'local' })
  const inputs = transformerInputs(await loadGolden(golden), false)
  const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
  const directory = referencePath('flux2-klein-tiny')
  const options = { subfolder: 'transformer' }

  await using shardedBackend = await ort({ device: 'cpu', threads: 1 })
  const sharded = await Flux2Transformer2DModel.fromPretrained(directory, {
    ...options,
    backend: shardedBackend,
    parallelConfig,
  })
  const expected = await sharded.run(inputs)

  await using backend = await ort({ device: 'cpu', threads: 1 })
  const model = await Flux2Transformer2DModel.fromPretrained(directory, { ...options, backend })
  const whole = backend.memory()
  await model.enableParallelism(parallelConfig)
  const output = await model.run(inputs)
  const split = { ...backend.memory(), executables: 0 }
  return {
    sharded: expected.data as Float32Array,
    split: output.data as Float32Array,
    memory: [whole, split],
    reports: [model.loadReport, sharded.loadReport],
  }
})

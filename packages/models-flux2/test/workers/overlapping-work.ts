import '@rankwise/collectives-local'
import { setTimeout as delay } from 'node:timers/promises'
import { ort } from '@rankwise/backend-ort'
import { initProcessGroup, TensorParallelConfig } from '@rankwise/core'
import { loadGolden, referencePath, runRank } from '@rankwise/fixtures'
import { Flux2Transformer2DModel } from '../../src/index.ts'
import { transformerInputs } from '../golden-inputs.ts'

export interface OverlappingWork {
  readonly golden: string
  /** Folder to save to. */
  readonly folder: string
}

/** Outputs of a split model that runs twice while another is loaded and it is saved, and of the one that was saved. */
runRank(async ({ golden, folder }: OverlappingWork): Promise<readonly Float32Array[]> => {
  await using group = await initProcessGroup({ backend: 'local' })
  await using backend = await ort({ device: 'cpu', threads: 1 })
  const inputs = transformerInputs(await loadGolden(golden), false)
  const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
  const load = (directory: string) => Flux2Transformer2DModel.fromPretrained(directory, { backend, parallelConfig })
  const original = referencePath('flux2-klein-tiny', 'transformer')
  const model = await load(original)
  // Ranks are seldom at the same place: without turns, the exchanges of one would meet others of the next.
  await delay(group.rank === 0 ? 30 : 0)
  const [first, , , second] = await Promise.all([
    model.run(inputs),
    load(original),
    model.saveShards(folder),
    model.run(inputs),
  ])
  const saved = await (await load(folder)).run(inputs)
  return [first, second, saved].map(({ data }) => data as Float32Array)
})

import '@rankwise/collectives-local'
import { ort } from '@rankwise/backend-ort'
import { type DType, initProcessGroup, type Tensor, TensorParallelConfig } from '@rankwise/core'
import { loadGolden, referencePath, runRank } from '@rankwise/fixtures'
import { transformerInputs } from '../golden-inputs.ts'
import { TappedTransformer } from '../tapped-transformer.ts'

export interface TappedRun {
  /** Folder of the checkpoint, which has a `transformer`. */
  readonly checkpoint: string
  readonly golden: string
  /** @default 'float32' */
  readonly dtype?: DType | undefined
}

export type Taps = Readonly<Record<string, Tensor['data']>>

/** Runs transformers on this rank and returns the output of every block. */
runRank(async (runs: readonly TappedRun[]): Promise<readonly Taps[]> => {
  await using group = await initProcessGroup({ backend: 'local' })
  await using backend = await ort({ device: 'cpu', threads: 1 })
  const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
  const results: Taps[] = []
  for (const { checkpoint, golden, dtype = 'float32' } of runs) {
    const directory = referencePath(checkpoint)
    await using model = await TappedTransformer.fromPretrained(directory, {
      subfolder: 'transformer',
      backend,
      dtype,
      parallelConfig,
    })
    const outputs = await model.taps(transformerInputs(await loadGolden(golden), model.config.guidanceEmbeds))
    results.push(
      Object.fromEntries(Object.entries(outputs).map(([name, output]) => [name, output.cast('float32').data])),
    )
  }
  return results
})

import '@rankwise/collectives-local'
import { ort } from '@rankwise/backend-ort'
import { initProcessGroup, TensorParallelConfig } from '@rankwise/core'
import { callOptions, directory } from '@rankwise/demo-flux2'
import { Generator } from '@rankwise/diffusion'
import { runRank } from '@rankwise/fixtures'
import { Flux2KleinPipeline, type TextEncoderPlacement } from '../../src/index.ts'

/** One picture. */
export interface Drawn {
  readonly image: Uint8Array
  /** Bytes of weights on the backend during each step, in memory or mapped. */
  readonly duringSteps: readonly number[]
}

/** Pictures of one placement of the text encoder on one rank. */
export interface LowMemoryResult {
  readonly usual: Drawn
  readonly low: readonly Drawn[]
  /** Bytes of the transformer and the VAE. */
  readonly others: number
  /** Bytes that are left once all is disposed. */
  readonly left: number
}

/** The same picture with the text encoder kept and, twice, with it loaded by the call. */
runRank(async (placements: readonly TextEncoderPlacement[]): Promise<readonly LowMemoryResult[]> => {
  await using group = await initProcessGroup({ backend: 'local' })
  await using backend = await ort({ device: 'cpu', threads: 1 })
  const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
  const held = () => backend.memory().weightBytes + backend.memory().mappedBytes
  const draw = async (pipeline: Awaited<ReturnType<typeof Flux2KleinPipeline.fromPretrained>>): Promise<Drawn> => {
    const duringSteps: number[] = []
    const callbackOnStepEnd = () => {
      duringSteps.push(held())
      return undefined
    }
    const generator = new Generator().manualSeed(42)
    const options = { ...callOptions, prompt: 'a cat on a blue background', numInferenceSteps: 2 }
    const { images } = await pipeline({ ...options, generator, callbackOnStepEnd })
    return { image: images[0].data, duringSteps }
  }
  const results: LowMemoryResult[] = []
  for (const textEncoderPlacement of placements) {
    const common = { backend, parallelConfig, textEncoderPlacement }
    const kept = await Flux2KleinPipeline.fromPretrained(directory, common)
    const usual = await draw(kept)
    await kept.dispose()
    const pipeline = await Flux2KleinPipeline.fromPretrained(directory, { ...common, lowMemory: true })
    const others = held()
    const low = [await draw(pipeline), await draw(pipeline)]
    await pipeline.dispose()
    results.push({ usual, low, others, left: held() })
  }
  return results
})

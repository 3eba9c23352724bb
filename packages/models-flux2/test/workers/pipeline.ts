import '@rankwise/collectives-local'
import { ort } from '@rankwise/backend-ort'
import { initProcessGroup, type Tensor, TensorParallelConfig } from '@rankwise/core'
import { Generator } from '@rankwise/diffusion'
import { runRank } from '@rankwise/fixtures'
import { type Flux2KleinOptions, Flux2KleinPipeline } from '../../src/index.ts'

export interface PipelineRun {
  readonly directory: string
  readonly seed: number
  readonly isDistilled?: boolean
  readonly options: Flux2KleinOptions<'image'>
}

export interface PipelineResult {
  /** Packed latents after every step. */
  readonly latents: readonly Float32Array[]
  /** RGB bytes. */
  readonly image: Uint8Array
  /** Bytes of the largest buffer that reading each transformer weight took. */
  readonly largestBuffers: ReadonlyMap<string, number>
}

/** Runs pipelines on this rank; the test hears of every step. */
runRank(async (runs: readonly PipelineRun[], ready): Promise<readonly PipelineResult[]> => {
  await using group = await initProcessGroup({ backend: 'local' })
  await using backend = await ort({ device: 'cpu', threads: 1 })
  const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
  const results: PipelineResult[] = []
  for (const { directory, seed, options, ...overrides } of runs) {
    await using pipeline = await Flux2KleinPipeline.fromPretrained(directory, { backend, parallelConfig, ...overrides })
    const latents: Float32Array[] = []
    const keep = (step: { readonly latents: Tensor<'float32'> }) => {
      ready()
      latents.push(step.latents.data)
      return undefined
    }
    const generator = new Generator().manualSeed(seed)
    const { images } = await pipeline({ ...options, generator, callbackOnStepEnd: keep })
    results.push({
      latents,
      image: images[0].data,
      largestBuffers: new Map(pipeline.transformer.loadReport.largestBuffers),
    })
  }
  return results
})

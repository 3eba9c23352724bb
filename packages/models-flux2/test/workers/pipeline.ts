import '@rankwise/collectives-local'
import { ort } from '@rankwise/backend-ort'
import { initProcessGroup, type Tensor, TensorParallelConfig } from '@rankwise/core'
import { Generator, Image } from '@rankwise/diffusion'
import { loadGolden, runRank } from '@rankwise/fixtures'
import { Flux2KleinKVPipeline, type Flux2KleinOptions, Flux2KleinPipeline, Flux2Pipeline } from '../../src/index.ts'

const CLASSES = { Flux2Pipeline, Flux2KleinPipeline, Flux2KleinKVPipeline }

export interface PipelineRun {
  /** @default 'Flux2KleinPipeline' */
  readonly type?: keyof typeof CLASSES
  readonly directory: string
  /** Golden that has the reference images, and how many. */
  readonly references?: readonly [golden: string, count: number]
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

async function images(golden: string, count: number): Promise<readonly Image[]> {
  const tensors = await loadGolden(golden)
  return Array.from({ length: count }, (_, i) => {
    const { shape, data } = tensors.get(`ref_image_u8.${i}`)
    const [height, width] = shape as readonly [number, number]
    return new Image(width, height, data as Uint8Array)
  })
}

/** Runs pipelines on this rank; the test hears of every step. */
runRank(async (runs: readonly PipelineRun[], ready): Promise<readonly PipelineResult[]> => {
  await using group = await initProcessGroup({ backend: 'local' })
  await using backend = await ort({ device: 'cpu', threads: 1 })
  const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
  const results: PipelineResult[] = []
  for (const { type = 'Flux2KleinPipeline', directory, references, seed, options, isDistilled } of runs) {
    const overrides = isDistilled === undefined ? {} : { isDistilled }
    await using pipeline = await CLASSES[type].fromPretrained(directory, { backend, parallelConfig, ...overrides })
    const image = references === undefined ? {} : { image: await images(...references) }
    const latents: Float32Array[] = []
    const keep = (step: { readonly latents: Tensor<'float32'> }) => {
      ready()
      latents.push(step.latents.data)
      return undefined
    }
    const generator = new Generator().manualSeed(seed)
    const output = await pipeline.generate<'image'>({ ...options, ...image, generator, callbackOnStepEnd: keep })
    results.push({
      latents,
      image: output.images[0].data,
      largestBuffers: new Map(pipeline.transformer.loadReport.largestBuffers),
    })
  }
  return results
})

import '@rankwise/collectives-local'
import { ort } from '@rankwise/backend-ort'
import { initProcessGroup, type Tensor, TensorParallelConfig } from '@rankwise/core'
import { Generator } from '@rankwise/diffusion'
import { runRank } from '@rankwise/fixtures'
import {
  type AnyFlux2Pipeline,
  type DenoisingStep,
  Flux2KleinKVPipeline,
  type Flux2KleinOptions,
  Flux2KleinPipeline,
  Flux2Pipeline,
  Flux2Transformer2DModel,
  type PipelineDType,
  type TextEncoderPlacement,
} from '../../src/index.ts'
import { goldenImages } from '../golden-images.ts'

const CLASSES = { Flux2Pipeline, Flux2KleinPipeline, Flux2KleinKVPipeline }

export interface PipelineRun {
  /** @default 'Flux2KleinPipeline' */
  readonly type?: keyof typeof CLASSES
  readonly directory: string
  /** Golden that has the reference images, and how many. */
  readonly references?: readonly [golden: string, count: number]
  readonly seed: number
  readonly isDistilled?: boolean
  readonly textEncoderPlacement?: TextEncoderPlacement
  /** @default 'float32' */
  readonly dtype?: PipelineDType
  readonly options: Flux2KleinOptions<'image'>
}

/** A tensor as it arrives at the test. */
export type SentTensor = Pick<Tensor, 'dtype' | 'shape' | 'data'>

export interface Forward {
  readonly timestep: SentTensor
  readonly promptEmbeds: SentTensor
  readonly sample: SentTensor
}

export interface PipelineResult {
  /** Packed latents after every step. */
  readonly latents: readonly SentTensor[]
  /** What the transformer was called with, and what it gave: by step, but for steps that take or leave a cache. */
  readonly forwards: readonly Forward[]
  /** RGB bytes. */
  readonly image: Uint8Array
  /** Bytes of the largest buffer that reading each transformer weight took. */
  readonly largestBuffers: ReadonlyMap<string, number>
}

type Load = (run: PipelineRun) => Promise<AnyFlux2Pipeline>

/** Loads the pipeline of a run unless it is that of the run before. */
function lastPipeline(load: Load): Load & AsyncDisposable {
  let last: { readonly key: string; readonly pipeline: AnyFlux2Pipeline } | undefined
  const dispose = async () => last?.pipeline.dispose()
  const get = async (run: PipelineRun) => {
    const { type, directory, isDistilled, textEncoderPlacement, dtype } = run
    const key = JSON.stringify([type, directory, isDistilled, textEncoderPlacement, dtype])
    if (last?.key === key) return last.pipeline
    await dispose()
    last = undefined
    last = { key, pipeline: await load(run) }
    return last.pipeline
  }
  return Object.assign(get, { [Symbol.asyncDispose]: dispose })
}

function sent({ dtype, shape, data }: Tensor): SentTensor {
  return { dtype, shape, data }
}

/** The forwards of a transformer from here on, until the next call. */
function recordForwards(transformer: Flux2Transformer2DModel): readonly Forward[] {
  const forwards: Forward[] = []
  transformer.run = async (inputs, options) => {
    const sample = await Flux2Transformer2DModel.prototype.run.call(transformer, inputs, options)
    forwards.push({
      timestep: sent(inputs.timestep),
      promptEmbeds: sent(inputs.encoderHiddenStates),
      sample: sent(sample),
    })
    return sample
  }
  return forwards
}

/** Runs pipelines on this rank; the test hears of every step. */
runRank(async (runs: readonly PipelineRun[], ready): Promise<readonly PipelineResult[]> => {
  await using group = await initProcessGroup({ backend: 'local' })
  await using backend = await ort({ device: 'cpu', threads: 1 })
  const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
  await using pipelineOf = lastPipeline((run) => {
    const { type = 'Flux2KleinPipeline', directory, isDistilled, textEncoderPlacement = 'replicated' } = run
    const { dtype = 'float32' } = run
    const overrides = { dtype, textEncoderPlacement, ...(isDistilled === undefined ? {} : { isDistilled }) }
    return CLASSES[type].fromPretrained(directory, { backend, parallelConfig, ...overrides })
  })
  const results: PipelineResult[] = []
  for (const run of runs) {
    const { references, seed, options } = run
    const pipeline = await pipelineOf(run)
    const image = references === undefined ? {} : { image: await goldenImages(...references) }
    const latents: SentTensor[] = []
    const keep = (step: DenoisingStep) => {
      ready()
      latents.push(sent(step.latents))
      return undefined
    }
    const forwards = recordForwards(pipeline.transformer)
    const generator = new Generator().manualSeed(seed)
    const output = await pipeline.generate<'image'>({ ...options, ...image, generator, callbackOnStepEnd: keep })
    results.push({
      latents,
      forwards,
      image: output.images[0].data,
      largestBuffers: new Map(pipeline.transformer.loadReport.largestBuffers),
    })
  }
  return results
})

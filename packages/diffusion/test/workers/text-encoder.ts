import '@rankwise/collectives-local'
import { ort } from '@rankwise/backend-ort'
import { type FromPretrainedOptions, initProcessGroup, type LoadReport, TensorParallelConfig } from '@rankwise/core'
import { referencePath, runRank } from '@rankwise/fixtures'
import type { DecoderTextEncoder } from '../../src/decoder-text-encoder.ts'
import { Mistral3ForConditionalGeneration } from '../../src/mistral3.ts'
import { Qwen3ForCausalLM } from '../../src/qwen3.ts'
import { textGoldens } from '../text-goldens.ts'

/** The pipeline whose text encoder runs. */
export type EncoderPipeline = 'flux2-klein-tiny' | 'flux2-tiny'

export interface SplitEncoderResult {
  /** Embeddings of the encoder that was loaded split. */
  readonly embeds: Float32Array
  /** Those of one that was loaded whole and split then. */
  readonly split: Float32Array
  readonly reports: readonly [sharded: LoadReport, split: LoadReport]
}

/** Of the golden. */
const LENGTH = 128

const LOADERS: Readonly<
  Record<EncoderPipeline, (directory: string, options: FromPretrainedOptions) => Promise<DecoderTextEncoder>>
> = {
  'flux2-klein-tiny': (directory, options) => Qwen3ForCausalLM.fromPretrained(directory, options),
  'flux2-tiny': (directory, options) => Mistral3ForConditionalGeneration.fromPretrained(directory, options),
}

/** Both ways to a split text encoder, on this rank. */
runRank(async (pipeline: EncoderPipeline): Promise<SplitEncoderResult> => {
  await using group = await initProcessGroup({ backend: 'local' })
  await using backend = await ort({ device: 'cpu', threads: 1 })
  const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
  const options = { subfolder: 'text_encoder', backend }
  const directory = referencePath(pipeline)
  const load = LOADERS[pipeline]
  const { inputs } = await textGoldens(pipeline, '').prompts(LENGTH)
  await using sharded = await load(directory, { ...options, parallelConfig })
  const embeds = await sharded.encode(inputs)
  await using whole = await load(directory, options)
  await whole.enableParallelism(parallelConfig)
  const split = await whole.encode(inputs)
  return {
    embeds: embeds.data as Float32Array,
    split: split.data as Float32Array,
    reports: [sharded.loadReport, whole.loadReport],
  }
})

import { type ModelMixin, type SaveProgress, saveModel, type TensorType } from '@rankwise/core'
import { SyntheticWeights } from './synthetic-weights.ts'
import { Flux2Transformer2DModel } from './transformer.ts'

/** A model of which there are no weights yet. */
export interface SyntheticModel {
  readonly config: object
  readonly weightsName: string
  readonly model: ModelMixin
}

/** How a model is written. */
interface WriteOptions {
  /** What progress calls it. */
  readonly component: string
  readonly weights: SyntheticWeights
  readonly signal?: AbortSignal | undefined
  readonly onProgress?: ((progress: SaveProgress) => void) | undefined
}

/** Writes a model with random weights in bfloat16, as diffusers does. @throws RankwiseError `SAVE_*`, `ABORTED` */
export async function writeSyntheticModel(
  directory: string,
  { config, weightsName, model }: SyntheticModel,
  { weights, ...options }: WriteOptions,
): Promise<void> {
  const tensors = new Map(
    Array.from(model.namedParameters(), ([name, { shape }]) => [name, { dtype: 'bfloat16', shape } as TensorType]),
  )
  await saveModel(directory, {
    ...options,
    config: JSON.stringify(config, undefined, 2),
    weightsName,
    tensors,
    read: async (name) => weights.weight(name, (tensors.get(name) as TensorType).shape),
  })
}

/**
 * Writes a FLUX.2 transformer of any size with random weights in bfloat16, to measure time and memory with: in one file up
 * to 10 GB.
 *
 * @param config - as in its `config.json`, such as those of `FLUX2_PRESETS`
 * @throws RankwiseError `CONFIG_INVALID`, `SAVE_*`, `ABORTED`
 */
export async function writeSyntheticTransformer(
  directory: string,
  config: object,
  options: Pick<WriteOptions, 'signal' | 'onProgress'> = {},
): Promise<void> {
  const model = Flux2Transformer2DModel.fromConfig(config)
  const weightsName = 'diffusion_pytorch_model'
  const weights = new SyntheticWeights()
  await writeSyntheticModel(
    directory,
    { config, weightsName, model },
    { component: 'transformer', weights, ...options },
  )
}

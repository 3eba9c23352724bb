import { join } from 'node:path'
import {
  type FromPretrainedOptions,
  type HubRepository,
  joinedCollectives,
  loadTogether,
  type ModelClass,
  openLocalWeights,
  readConfig,
  type TensorParallelConfig,
} from '@rankwise/core'
import { type DecoderTextEncoder, FirstRankTextEncoder, type HiddenStateEncoder } from '@rankwise/diffusion'

/**
 * Where the weights of a text encoder are: all of them on every rank, those of each rank's heads and columns, or all of
 * them on rank 0, which sends the others what it encodes.
 */
export type TextEncoderPlacement = 'replicated' | 'sharded' | 'rank0'

export const DEFAULT_PLACEMENT: TextEncoderPlacement = 'replicated'

/** Class of a text encoder. */
export interface TextEncoderClass extends ModelClass<DecoderTextEncoder> {
  readonly weightsName: string
  /** Loads a text encoder, with a `parallelConfig` split. */
  fromPretrained(
    this: ModelClass<DecoderTextEncoder>,
    pathOrId: string,
    options: FromPretrainedOptions,
  ): Promise<DecoderTextEncoder>
}

/** Folder of the text encoder in that of a pipeline. */
export const TEXT_ENCODER_FOLDER = 'text_encoder'

/** How `loadPlacedTextEncoder` loads. */
interface PlacedLoadOptions extends Pick<FromPretrainedOptions, 'signal' | 'within'> {
  readonly parallelConfig: TensorParallelConfig | undefined
}

/** Loads a text encoder on all ranks of `parallelConfig` or on none; all call it together. */
export async function loadPlacedTextEncoder(
  load: (options: Pick<FromPretrainedOptions, 'signal' | 'within' | 'parallelConfig'>) => Promise<HiddenStateEncoder>,
  placement: TextEncoderPlacement,
  { parallelConfig, ...common }: PlacedLoadOptions,
): Promise<HiddenStateEncoder> {
  if (placement === 'sharded') return load({ ...common, ...(parallelConfig === undefined ? {} : { parallelConfig }) })
  if (placement === 'rank0') return FirstRankTextEncoder.create((signal) => load({ signal }), common)
  return loadTogether((signal) => load({ signal }), {
    ...common,
    collectives: joinedCollectives(parallelConfig?.tpDegree ?? 1),
    release: (encoder) => encoder.dispose(),
  })
}

/**
 * Refuses early what a later load would refuse, as far as that costs no weights: the config and the headers of the weight
 * files. What the hub has is brought into the cache, unless only parts of the weights are wanted.
 *
 * @throws RankwiseError `CONFIG_*`, `CHECKPOINT_*`, `SAFETENSORS_*`, `HUB_*`, `ABORTED`
 */
export async function checkTextEncoder(
  place: string | HubRepository,
  type: TextEncoderClass,
  { download = 'snapshot', signal }: Pick<FromPretrainedOptions, 'download' | 'signal'>,
): Promise<void> {
  const { weightsName } = type
  const selection = {
    files: [`${TEXT_ENCODER_FOLDER}/config.json`],
    folders: [TEXT_ENCODER_FOLDER],
    weightsNames: [weightsName],
    weights: download === 'snapshot',
  }
  const directory = typeof place === 'string' ? place : await place.download(selection, { signal })
  const folder = join(directory, TEXT_ENCODER_FOLDER)
  type.fromConfig(await readConfig(folder))
  if (typeof place !== 'string' && !selection.weights) return
  // Opening checks the headers.
  await using _weights = await openLocalWeights(folder, { weightsName })
}

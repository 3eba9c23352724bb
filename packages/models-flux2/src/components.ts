import {
  type Backend,
  type DType,
  type FromFirst,
  type FromHubOptions,
  type HubRepository,
  hubOptionsOf,
  joinedCollectives,
  type LoadProgress,
  loadTogether,
  openPretrained,
  readConfig,
  type TensorParallelConfig,
} from '@rankwise/core'
import {
  AutoencoderKLFlux2,
  FlowMatchEulerDiscreteScheduler,
  parseWith,
  Qwen3ForCausalLM,
  Tokenizer,
} from '@rankwise/diffusion'
import { z } from 'zod'
import { Flux2Transformer2DModel } from './transformer.ts'

/** Everything a klein pipeline is made of; each model is on its backend. */
export interface Flux2KleinComponents {
  readonly transformer: Flux2Transformer2DModel
  readonly textEncoder: Qwen3ForCausalLM
  readonly vae: AutoencoderKLFlux2
  readonly tokenizer: Tokenizer
  readonly scheduler: FlowMatchEulerDiscreteScheduler
  /** Whether the model was distilled to few steps and takes no guidance. */
  readonly isDistilled: boolean
}

/** Options of `Flux2KleinPipeline.fromPretrained`; components that are given are not loaded. */
export interface Flux2KleinFromPretrainedOptions extends Partial<Flux2KleinComponents>, FromHubOptions {
  readonly backend: Backend
  /** Splits the transformer over the ranks of the process group; not together with a `transformer` of your own. */
  readonly parallelConfig?: TensorParallelConfig
  /** @default 'float32' */
  readonly dtype?: DType
  /** Aborts the load with `ABORTED`. */
  readonly signal?: AbortSignal
  /** Called after every weight of every model. */
  readonly onProgress?: (progress: LoadProgress) => void
}

/** What is read at once; the models fetch their own parts. */
const SMALL_PARTS = { files: ['model_index.json'], folders: ['scheduler', 'tokenizer'], weights: false }

const modelIndexSchema = z.looseObject({
  _class_name: z.literal('Flux2KleinPipeline'),
  is_distilled: z.boolean().default(false),
})

/**
 * Loads what is not given, on all ranks that the transformer is split over or on none; when a part fails, those loaded
 * before are freed again.
 */
export async function loadComponents(
  pathOrId: string,
  options: Flux2KleinFromPretrainedOptions,
): Promise<Flux2KleinComponents> {
  const { parallelConfig, signal } = options
  const collectives = joinedCollectives(parallelConfig?.tpDegree ?? 1)
  const loaded: AsyncDisposable[] = []
  const own = <M extends AsyncDisposable>(model: M): M => {
    loaded.push(model)
    return model
  }
  const release = async () => {
    for (const model of loaded.splice(0)) await model[Symbol.asyncDispose]()
  }
  try {
    const load = async (signal: AbortSignal, fromFirst: FromFirst) => {
      const repository = await openPretrained(pathOrId, { ...hubOptionsOf(options), signal, fromFirst })
      return { repository, parts: await loadWholeParts(pathOrId, repository, { ...options, signal }, own) }
    }
    const { repository, parts } = await loadTogether(load, { collectives, signal, release })
    const transformer =
      options.transformer ??
      own(
        await Flux2Transformer2DModel.fromPretrained(pathOrId, {
          ...modelOptions(options, repository),
          ...(parallelConfig === undefined ? {} : { parallelConfig }),
          subfolder: 'transformer',
        }),
      )
    return { ...parts, transformer }
  } catch (error) {
    await release()
    throw error
  }
}

/** Those that every rank has whole. */
async function loadWholeParts(
  pathOrId: string,
  repository: HubRepository | undefined,
  options: Flux2KleinFromPretrainedOptions,
  own: <M extends AsyncDisposable>(model: M) => M,
): Promise<Omit<Flux2KleinComponents, 'transformer'>> {
  const directory = (await repository?.download(SMALL_PARTS, { signal: options.signal })) ?? pathOrId
  const config = await readConfig(directory, 'model_index.json')
  const index = parseWith(modelIndexSchema, config, `${directory}/model_index.json`)
  const tokenizer = options.tokenizer ?? (await Tokenizer.fromPretrained(directory, { subfolder: 'tokenizer' }))
  const scheduler =
    options.scheduler ?? (await FlowMatchEulerDiscreteScheduler.fromPretrained(directory, { subfolder: 'scheduler' }))
  const common = modelOptions(options, repository)
  const textEncoder =
    options.textEncoder ??
    own(await Qwen3ForCausalLM.fromPretrained(pathOrId, { ...common, subfolder: 'text_encoder' }))
  const vae = options.vae ?? own(await AutoencoderKLFlux2.fromPretrained(pathOrId, { ...common, subfolder: 'vae' }))
  return { tokenizer, scheduler, textEncoder, vae, isDistilled: options.isDistilled ?? index.is_distilled }
}

/** Options of every model. All parts are of one commit, though the branch may move on. */
function modelOptions(options: Flux2KleinFromPretrainedOptions, repository: HubRepository | undefined) {
  const { backend, dtype, signal, onProgress } = options
  return {
    ...hubOptionsOf(options),
    ...(repository === undefined ? {} : { revision: repository.commit }),
    backend,
    ...(dtype === undefined ? {} : { dtype }),
    ...(signal === undefined ? {} : { signal }),
    ...(onProgress === undefined ? {} : { onProgress }),
  }
}

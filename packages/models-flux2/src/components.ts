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
  RankwiseError,
  type TensorParallelConfig,
} from '@rankwise/core'
import {
  AutoencoderKLFlux2,
  FlowMatchEulerDiscreteScheduler,
  type HiddenStateEncoder,
  Tokenizer,
} from '@rankwise/diffusion'
import { readModelIndex, requireClass } from './model-index.ts'
import { OnDemandTextEncoder } from './on-demand-text-encoder.ts'
import { checkOptionNames } from './option-names.ts'
import {
  checkTextEncoder,
  loadPlacedTextEncoder,
  TEXT_ENCODER_FOLDER,
  type TextEncoderClass,
  type TextEncoderPlacement,
} from './text-encoder.ts'
import { Flux2Transformer2DModel } from './transformer.ts'

/** What all FLUX.2 pipelines are made of; each model is on its backend. */
export interface Flux2Components {
  readonly transformer: Flux2Transformer2DModel
  readonly textEncoder: HiddenStateEncoder
  readonly vae: AutoencoderKLFlux2
  readonly tokenizer: Tokenizer
  readonly scheduler: FlowMatchEulerDiscreteScheduler
}

/** Everything a klein pipeline is made of. */
export interface Flux2KleinComponents extends Flux2Components {
  /** Whether the model was distilled to few steps and takes no guidance. */
  readonly isDistilled: boolean
}

/** Options of a pipeline's `fromPretrained`; components that are given are not loaded. */
export interface Flux2FromPretrainedOptions extends Partial<Flux2Components>, FromHubOptions {
  readonly backend: Backend
  /** Splits the transformer over the ranks of the process group; not together with a `transformer` of your own. */
  readonly parallelConfig?: TensorParallelConfig
  /**
   * Where the weights of the text encoder are; other than `'replicated'`, together with `parallelConfig`.
   *
   * @default 'replicated'
   */
  readonly textEncoderPlacement?: TextEncoderPlacement
  /**
   * Loads the text encoder when a call needs it, and frees it before the denoising: the two never take memory together,
   * and every call with a `prompt` loads it anew. Not together with a `textEncoder` of your own.
   *
   * @default false
   */
  readonly lowMemory?: boolean
  /** @default 'float32' */
  readonly dtype?: DType
  /** Aborts the load with `ABORTED`. */
  readonly signal?: AbortSignal
  /** Called after every weight of every model. */
  readonly onProgress?: (progress: LoadProgress) => void
}

/** Options of `Flux2KleinPipeline.fromPretrained`. */
export interface Flux2KleinFromPretrainedOptions
  extends Flux2FromPretrainedOptions,
    Partial<Pick<Flux2KleinComponents, 'isDistilled'>> {}

/** What a pipeline class loads. */
export interface PipelineParts {
  /** Class of the pipeline. */
  readonly name: string
  /** Classes of pipelines that have the same parts. */
  readonly accepted: readonly string[]
  readonly options: readonly (keyof Flux2KleinFromPretrainedOptions)[]
  readonly textEncoder: TextEncoderClass
}

const LOAD_OPTIONS: Readonly<Record<keyof Flux2FromPretrainedOptions, true>> = {
  transformer: true,
  textEncoder: true,
  vae: true,
  tokenizer: true,
  scheduler: true,
  backend: true,
  parallelConfig: true,
  textEncoderPlacement: true,
  lowMemory: true,
  dtype: true,
  signal: true,
  onProgress: true,
  revision: true,
  token: true,
  cacheDir: true,
  localFilesOnly: true,
  endpoint: true,
  download: true,
}

/** Names of the options that `fromPretrained` of every pipeline takes. */
export const LOAD_OPTION_NAMES = Object.keys(LOAD_OPTIONS) as readonly (keyof Flux2FromPretrainedOptions)[]

/** What is read at once; the models fetch their own parts. */
const SMALL_PARTS = { files: ['model_index.json'], folders: ['scheduler', 'tokenizer'], weights: false }

/**
 * Loads what is not given, on all ranks that the transformer is split over or on none; when a part fails, those loaded
 * before are freed again.
 */
export async function loadComponents(
  pathOrId: string,
  options: Flux2KleinFromPretrainedOptions,
  kind: PipelineParts,
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
      checkLoadOptions(options, kind)
      const repository = await openPretrained(pathOrId, { ...hubOptionsOf(options), signal, fromFirst })
      return { repository, parts: await loadWholeParts(pathOrId, repository, { ...options, signal }, kind, own) }
    }
    const { repository, parts } = await loadTogether(load, { collectives, signal, release })
    const textEncoder = parts.textEncoder ?? own(await textEncoderFor(pathOrId, repository, options, kind))
    const transformer =
      options.transformer ??
      own(
        await Flux2Transformer2DModel.fromPretrained(pathOrId, {
          ...modelOptions(options, repository),
          ...(parallelConfig === undefined ? {} : { parallelConfig }),
          subfolder: 'transformer',
        }),
      )
    return { ...parts, textEncoder, transformer }
  } catch (error) {
    await release()
    throw error
  }
}

/** @throws RankwiseError `OPTION_UNKNOWN`, `OPTION_CONFLICT` */
function checkLoadOptions(options: Flux2KleinFromPretrainedOptions, kind: PipelineParts): void {
  checkOptionNames(`${kind.name}.fromPretrained`, options, kind.options)
  checkPlacement(options)
  checkLowMemory(options)
  if (options.transformer === undefined || options.parallelConfig === undefined) return
  throw new RankwiseError('OPTION_CONFLICT', 'a transformer that is already loaded cannot be split here', {
    where: 'parallelConfig',
    remedy: 'pass parallelConfig to Flux2Transformer2DModel.fromPretrained',
  })
}

/** @throws RankwiseError `OPTION_INVALID`, `OPTION_CONFLICT` */
function checkPlacement({ textEncoderPlacement, textEncoder, parallelConfig }: Flux2KleinFromPretrainedOptions): void {
  const where = 'textEncoderPlacement'
  if (textEncoderPlacement === undefined || textEncoderPlacement === 'replicated') return
  if (textEncoderPlacement !== 'sharded' && textEncoderPlacement !== 'rank0') {
    throw new RankwiseError('OPTION_INVALID', `a text encoder is not placed as '${textEncoderPlacement}'`, {
      where,
      rule: "textEncoderPlacement is 'replicated', 'sharded' or 'rank0'",
    })
  }
  if (textEncoder === undefined && parallelConfig !== undefined) return
  throw new RankwiseError('OPTION_CONFLICT', 'there is no text encoder to load on several ranks', {
    where,
    actual: { textEncoder: textEncoder === undefined ? 'to load' : 'given', parallelConfig: parallelConfig?.tpDegree },
    rule: 'it places the text encoder that is loaded here, over the ranks of parallelConfig',
  })
}

/** @throws RankwiseError `OPTION_INVALID`, `OPTION_CONFLICT` */
function checkLowMemory({ lowMemory = false, textEncoder }: Flux2KleinFromPretrainedOptions): void {
  const where = 'lowMemory'
  if (typeof lowMemory !== 'boolean') {
    throw new RankwiseError('OPTION_INVALID', `lowMemory cannot be ${String(lowMemory)}`, {
      where,
      rule: 'lowMemory is a boolean',
    })
  }
  if (!lowMemory || textEncoder === undefined) return
  throw new RankwiseError('OPTION_CONFLICT', 'a text encoder that is given is not loaded and freed here', {
    where,
    rule: 'lowMemory is for a text encoder that the pipeline loads',
    remedy: 'drop textEncoder, or free it yourself and give the calls promptEmbeds',
  })
}

/** The text encoder of which not every rank has all weights, or which is loaded by the calls. */
async function textEncoderFor(
  pathOrId: string,
  repository: HubRepository | undefined,
  options: Flux2KleinFromPretrainedOptions,
  kind: PipelineParts,
): Promise<HiddenStateEncoder> {
  const { parallelConfig, textEncoderPlacement = 'replicated' } = options
  const common = { ...modelOptions(options, repository), subfolder: TEXT_ENCODER_FOLDER }
  const load = (signal: AbortSignal | undefined) =>
    loadPlacedTextEncoder(
      (own) => kind.textEncoder.fromPretrained(pathOrId, { ...common, ...own }),
      textEncoderPlacement,
      {
        parallelConfig,
        signal,
      },
    )
  return options.lowMemory === true ? new OnDemandTextEncoder(load) : load(options.signal)
}

/** Those that every rank has whole. */
async function loadWholeParts(
  pathOrId: string,
  repository: HubRepository | undefined,
  options: Flux2KleinFromPretrainedOptions,
  kind: PipelineParts,
  own: <M extends AsyncDisposable>(model: M) => M,
): Promise<Omit<Flux2KleinComponents, 'transformer' | 'textEncoder'> & Partial<Flux2Components>> {
  const directory = (await repository?.download(SMALL_PARTS, { signal: options.signal })) ?? pathOrId
  const index = await readModelIndex(directory)
  requireClass(index, kind.accepted, pathOrId)
  const tokenizer = options.tokenizer ?? (await Tokenizer.fromPretrained(directory, { subfolder: 'tokenizer' }))
  const scheduler =
    options.scheduler ?? (await FlowMatchEulerDiscreteScheduler.fromPretrained(directory, { subfolder: 'scheduler' }))
  const common = modelOptions(options, repository)
  const isReplicated = (options.textEncoderPlacement ?? 'replicated') === 'replicated'
  const isLoadedHere = isReplicated && options.lowMemory !== true
  if (options.lowMemory === true) await checkTextEncoder(repository ?? pathOrId, kind.textEncoder, options)
  const loadTextEncoder = () => kind.textEncoder.fromPretrained(pathOrId, { ...common, subfolder: TEXT_ENCODER_FOLDER })
  const textEncoder = options.textEncoder ?? (isLoadedHere ? own(await loadTextEncoder()) : undefined)
  const vae = options.vae ?? own(await AutoencoderKLFlux2.fromPretrained(pathOrId, { ...common, subfolder: 'vae' }))
  const isDistilled = options.isDistilled ?? index.isDistilled
  return { tokenizer, scheduler, vae, isDistilled, ...(textEncoder === undefined ? {} : { textEncoder }) }
}

/** Options of every model. All parts are of one commit, though the branch may move on. */
function modelOptions(options: Flux2FromPretrainedOptions, repository: HubRepository | undefined) {
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

import {
  type Backend,
  type FromFirst,
  type FromHubOptions,
  type HubRepository,
  hubOptionsOf,
  joinedCollectives,
  type LoadProgress,
  loadTogether,
  openPretrained,
  type SayOptions,
  type TensorParallelConfig,
} from '@rankwise/core'
import {
  AutoencoderKLFlux2,
  FlowMatchEulerDiscreteScheduler,
  type HiddenStateEncoder,
  Tokenizer,
} from '@rankwise/diffusion'
import { type ComponentDTypes, type ComponentName, dtypeOf } from './component-dtypes.ts'
import { loadAll } from './load-all.ts'
import { checkLoadOptions, sharedOptionsOf } from './load-options.ts'
import { readModelIndex, requireClass } from './model-index.ts'
import { OnDemandTextEncoder } from './on-demand-text-encoder.ts'
import {
  checkTextEncoder,
  DEFAULT_PLACEMENT,
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
   * and every call with a `prompt` loads it anew. The other models load one after the other. Not together with a
   * `textEncoder` of your own.
   *
   * @default false
   */
  readonly lowMemory?: boolean
  /**
   * What the models compute in, whatever the checkpoint stores: one dtype, or `{ default, transformer, textEncoder, vae }`.
   * Noise and latents are in that of the transformer, and are cast where they go to another model. Models that are given
   * keep theirs; where all are given, it is `OPTION_CONFLICT`.
   *
   * @default 'float32', also for models that an object does not name, where it has no `default`
   */
  readonly dtype?: ComponentDTypes
  /** Aborts the load with `ABORTED`. */
  readonly signal?: AbortSignal
  /** Called after every weight of every model; `component` is its folder. Several may load at the same time. */
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

/** What is read at once; the models fetch their own parts. */
const SMALL_PARTS = { files: ['model_index.json'], folders: ['scheduler', 'tokenizer'], weights: false }

/**
 * Loads what is not given, on all ranks that the transformer is split over or on none; when a part fails, the others are
 * aborted and freed again.
 */
export async function loadComponents(
  pathOrId: string,
  options: Flux2KleinFromPretrainedOptions,
  kind: PipelineParts,
): Promise<Flux2KleinComponents> {
  const load = async (signal: AbortSignal, fromFirst: FromFirst, sayOptions: SayOptions) => {
    checkLoadOptions(options, kind)
    sayOptions(sharedOptionsOf(options))
    const repository = await openPretrained(pathOrId, { ...hubOptionsOf(options), signal, fromFirst })
    return loadParts({ pathOrId, repository, options, kind, within: fromFirst }, signal)
  }
  const { components } = await loadTogether(load, {
    collectives: joinedCollectives(options.parallelConfig?.tpDegree ?? 1),
    signal: options.signal,
    release: async ({ loaded }) => {
      for (const model of loaded) await model[Symbol.asyncDispose]()
    },
  })
  return components
}

type Models = Pick<Flux2Components, ComponentName>

/** A pipeline that is loaded, and from where. */
interface Loading {
  readonly pathOrId: string
  readonly repository: HubRepository | undefined
  readonly options: Flux2KleinFromPretrainedOptions
  readonly kind: PipelineParts
  /** The load that all models are parts of. */
  readonly within: FromFirst
}

/** All components, and those among them that were loaded and have weights. */
async function loadParts(
  loading: Loading,
  signal: AbortSignal,
): Promise<{ readonly components: Flux2KleinComponents; readonly loaded: readonly AsyncDisposable[] }> {
  const { pathOrId, repository, options, kind } = loading
  const directory = (await repository?.download(SMALL_PARTS, { signal })) ?? pathOrId
  const index = await readModelIndex(directory)
  requireClass(index, kind.accepted, pathOrId)
  const tokenizer = options.tokenizer ?? (await Tokenizer.fromPretrained(directory, { subfolder: 'tokenizer' }))
  const scheduler =
    options.scheduler ?? (await FlowMatchEulerDiscreteScheduler.fromPretrained(directory, { subfolder: 'scheduler' }))
  if (options.lowMemory === true)
    await checkTextEncoder(repository ?? pathOrId, kind.textEncoder, { ...options, signal })
  const missing = Object.entries(modelLoads(loading)).filter(([name]) => options[name as ComponentName] === undefined)
  const loaded = await loadAll(Object.fromEntries(missing), { isParallel: mayLoadAtOnce(options), signal })
  const { transformer, textEncoder, vae, isDistilled = index.isDistilled } = options
  const models = { transformer, textEncoder, vae, ...loaded } as Models
  return { components: { ...models, tokenizer, scheduler, isDistilled }, loaded: Object.values(loaded) }
}

/**
 * Whether the models load at the same time. That takes as much memory in the end as one after the other, and on the way
 * the buffers of several loads: for each at most 64 MiB, or one weight that is larger. `lowMemory` saves these. A backend
 * with `requireRoom` compares each model with what it has loaded before, not with what it is going to load.
 */
function mayLoadAtOnce({ backend, lowMemory = false }: Partial<Flux2FromPretrainedOptions>): boolean {
  return !lowMemory && backend?.requireRoom === undefined
}

/** How each model is loaded, the largest first. */
function modelLoads(loading: Loading): { readonly [K in ComponentName]: (signal: AbortSignal) => Promise<Models[K]> } {
  const { pathOrId, options, within } = loading
  const { parallelConfig } = options
  return {
    transformer: (signal) =>
      Flux2Transformer2DModel.fromPretrained(pathOrId, {
        ...modelOptions(loading, 'transformer'),
        ...(parallelConfig === undefined ? {} : { parallelConfig }),
        subfolder: 'transformer',
        signal,
        within,
      }),
    textEncoder: (signal) => textEncoderFor(loading, signal),
    vae: (signal) =>
      AutoencoderKLFlux2.fromPretrained(pathOrId, { ...modelOptions(loading, 'vae'), subfolder: 'vae', signal }),
  }
}

/** The text encoder, or one that the calls load. */
async function textEncoderFor(loading: Loading, signal: AbortSignal): Promise<HiddenStateEncoder> {
  const { pathOrId, options, kind, within } = loading
  const { parallelConfig, textEncoderPlacement = DEFAULT_PLACEMENT } = options
  const common = { ...modelOptions(loading, 'textEncoder'), subfolder: TEXT_ENCODER_FOLDER }
  const load = (placed: { readonly signal: AbortSignal | undefined; readonly within?: FromFirst }) =>
    loadPlacedTextEncoder(
      (own) => kind.textEncoder.fromPretrained(pathOrId, { ...common, ...own }),
      textEncoderPlacement,
      { parallelConfig, ...placed },
    )
  return options.lowMemory === true
    ? new OnDemandTextEncoder((callSignal) => load({ signal: callSignal }))
    : load({ signal, within })
}

/** Options of every model. All parts are of one commit, though the branch may move on. */
function modelOptions({ options, repository }: Loading, component: ComponentName) {
  const { backend, dtype, onProgress } = options
  return {
    ...hubOptionsOf(options),
    ...(repository === undefined ? {} : { revision: repository.commit }),
    backend,
    dtype: dtypeOf(component, dtype),
    ...(onProgress === undefined ? {} : { onProgress }),
  }
}

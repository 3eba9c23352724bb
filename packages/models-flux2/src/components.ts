import {
  type Backend,
  type DType,
  type FromHubOptions,
  hubOptionsOf,
  type LoadProgress,
  type TensorParallelConfig,
} from '@rankwise/core'
import {
  AutoencoderKLFlux2,
  type FlowMatchEulerDiscreteScheduler,
  Qwen3ForCausalLM,
  type Tokenizer,
} from '@rankwise/diffusion'
import { Flux2Transformer2DModel } from './transformer.ts'

/** The three models, each on its backend. */
export interface Flux2KleinModels {
  readonly transformer: Flux2Transformer2DModel
  readonly textEncoder: Qwen3ForCausalLM
  readonly vae: AutoencoderKLFlux2
}

/** Everything a klein pipeline is made of. */
export interface Flux2KleinComponents extends Flux2KleinModels {
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

/** Loads the models that are not given; when one fails, those loaded before are freed again. */
export async function loadModels(
  pathOrId: string,
  options: Flux2KleinFromPretrainedOptions,
): Promise<Flux2KleinModels> {
  const { backend, dtype, parallelConfig, signal, onProgress } = options
  const common = {
    ...hubOptionsOf(options),
    backend,
    ...(dtype === undefined ? {} : { dtype }),
    ...(signal === undefined ? {} : { signal }),
    ...(onProgress === undefined ? {} : { onProgress }),
  }
  const split = parallelConfig === undefined ? common : { ...common, parallelConfig }
  const loaded: AsyncDisposable[] = []
  const own = <M extends AsyncDisposable>(model: M): M => {
    loaded.push(model)
    return model
  }
  try {
    const textEncoder =
      options.textEncoder ??
      own(await Qwen3ForCausalLM.fromPretrained(pathOrId, { ...common, subfolder: 'text_encoder' }))
    const transformer =
      options.transformer ??
      own(await Flux2Transformer2DModel.fromPretrained(pathOrId, { ...split, subfolder: 'transformer' }))
    const vae = options.vae ?? own(await AutoencoderKLFlux2.fromPretrained(pathOrId, { ...common, subfolder: 'vae' }))
    return { textEncoder, transformer, vae }
  } catch (error) {
    for (const model of loaded) await model[Symbol.asyncDispose]()
    throw error
  }
}

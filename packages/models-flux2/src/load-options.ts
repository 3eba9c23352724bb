import { RankwiseError, textOf } from '@rankwise/core'
import { COMPONENTS, checkDTypes, dtypeOf } from './component-dtypes.ts'
import type { Flux2FromPretrainedOptions, Flux2KleinFromPretrainedOptions, PipelineParts } from './components.ts'
import { checkOptionNames } from './option-names.ts'
import { DEFAULT_PLACEMENT } from './text-encoder.ts'

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

/** Nothing has been read yet. @throws RankwiseError `OPTION_UNKNOWN`, `OPTION_INVALID`, `OPTION_CONFLICT`, `DTYPE_UNSUPPORTED` */
export function checkLoadOptions(options: Flux2KleinFromPretrainedOptions, kind: PipelineParts): void {
  checkOptionNames(`${kind.name}.fromPretrained`, options, kind.options)
  checkPlacement(options)
  checkLowMemory(options)
  checkDTypes(options)
  if (options.transformer === undefined || options.parallelConfig === undefined) return
  throw new RankwiseError('OPTION_CONFLICT', 'a transformer that is already loaded cannot be split here', {
    where: 'parallelConfig',
    remedy: 'pass parallelConfig to Flux2Transformer2DModel.fromPretrained',
  })
}

/**
 * Options, once they are checked, that are the same on all ranks which load a pipeline together: with others, they would
 * wait for each other in different work, or some would compute with less precision. Models that are given have a dtype
 * already, which the calls compare.
 */
export function sharedOptionsOf(options: Flux2KleinFromPretrainedOptions): Readonly<Record<string, string>> {
  const { textEncoderPlacement = DEFAULT_PLACEMENT, lowMemory = false, dtype } = options
  const loaded = COMPONENTS.filter((name) => options[name] === undefined)
  const dtypes = Object.fromEntries(loaded.map((name) => [`dtype.${name}`, dtypeOf(name, dtype)]))
  return { ...dtypes, lowMemory: String(lowMemory), textEncoderPlacement }
}

/** @throws RankwiseError `OPTION_INVALID`, `OPTION_CONFLICT` */
function checkPlacement({ textEncoderPlacement, textEncoder, parallelConfig }: Flux2KleinFromPretrainedOptions): void {
  const where = 'textEncoderPlacement'
  if (textEncoderPlacement === undefined || textEncoderPlacement === DEFAULT_PLACEMENT) return
  if (textEncoderPlacement !== 'sharded' && textEncoderPlacement !== 'rank0') {
    throw new RankwiseError('OPTION_INVALID', `a text encoder is not placed as '${textOf(textEncoderPlacement)}'`, {
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
    throw new RankwiseError('OPTION_INVALID', `lowMemory cannot be ${textOf(lowMemory)}`, {
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

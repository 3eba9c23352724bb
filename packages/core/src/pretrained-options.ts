import type { Backend } from './backend.ts'
import { ADAPTERS_RULE } from './checkpoint/foreign-checkpoint.ts'
import type { DType } from './dtype.ts'
import { RankwiseError } from './errors.ts'
import type { DownloadMode, HubOptions } from './hub/index.ts'
import type { FromFirst } from './load-agreement.ts'
import type { LoadProgress } from './load-weights.ts'
import { TensorParallelConfig } from './parallel-config.ts'
import { jsonOf } from './value-text.ts'

/** Where a model comes from when it is named by an id such as `org/name`, and how; a local folder needs none of it. */
export interface FromHubOptions
  extends Pick<HubOptions, 'revision' | 'token' | 'cacheDir' | 'localFilesOnly' | 'endpoint'> {
  /**
   * `'snapshot'` downloads whole files into the cache that Python's huggingface_hub shares; `'shards'` fetches only this
   * rank's byte ranges, into memory. @default 'snapshot'
   */
  readonly download?: DownloadMode | undefined
}

/** Options of `fromPretrained`. */
export interface FromPretrainedOptions extends FromHubOptions {
  /** Folder of the model inside the pipeline's. @default the folder itself */
  readonly subfolder?: string
  /** What the model computes in, whatever the checkpoint stores. @default 'float32' */
  readonly dtype?: DType
  readonly backend: Backend
  /** Splits the model over the ranks of the process group. @default every rank holds all of it */
  readonly parallelConfig?: TensorParallelConfig
  /** Aborts the load with `ABORTED`, on all ranks together. */
  readonly signal?: AbortSignal | undefined
  /** Called after every weight. */
  readonly onProgress?: (progress: LoadProgress) => void
  /** As `within` of `loadTogether`: for a model that is loaded together with others. @default by itself */
  readonly within?: FromFirst | undefined
}

/** What a value has to be, as a test and in words. */
interface OptionType {
  readonly accepts: (value: unknown) => boolean
  readonly rule: string
}

const TEXT: OptionType = { accepts: (value) => typeof value === 'string', rule: 'a string' }
const FLAG: OptionType = { accepts: (value) => typeof value === 'boolean', rule: 'a boolean' }
/** Those that have a code of their own. */
const CHECKED_ELSEWHERE: OptionType = { accepts: () => true, rule: '' }

const KNOWN_OPTIONS: Readonly<Record<keyof FromPretrainedOptions, OptionType>> = {
  revision: TEXT,
  token: { accepts: (value) => value === false || typeof value === 'string', rule: 'a string, or false to send none' },
  cacheDir: TEXT,
  localFilesOnly: FLAG,
  endpoint: TEXT,
  download: { accepts: (value) => value === 'snapshot' || value === 'shards', rule: "'snapshot' or 'shards'" },
  subfolder: TEXT,
  dtype: CHECKED_ELSEWHERE,
  backend: { accepts: (value) => typeof (value as Backend | null)?.loadShard === 'function', rule: 'a Backend' },
  parallelConfig: CHECKED_ELSEWHERE,
  signal: { accepts: (value) => value instanceof AbortSignal, rule: 'an AbortSignal' },
  onProgress: { accepts: (value) => typeof value === 'function', rule: 'a function' },
  within: { accepts: (value) => typeof value === 'function', rule: 'what loadTogether gives to a load' },
}

const HUB_OPTIONS = ['revision', 'token', 'cacheDir', 'localFilesOnly', 'endpoint', 'download'] as const

/** The options among these that say where a model comes from. */
export function hubOptionsOf(options: FromHubOptions): FromHubOptions {
  return Object.fromEntries(HUB_OPTIONS.flatMap((name) => (options[name] === undefined ? [] : [[name, options[name]]])))
}

interface Refusal {
  readonly code: string
  /** Values that ask for nothing. */
  readonly harmless: readonly unknown[]
  readonly rule: string
  readonly remedy: string
}

/** Options of diffusers that cannot go together with loading slice by slice, or that a backend decides here. */
const REFUSED_OPTIONS: Readonly<Record<string, Refusal>> = {
  deviceMap: {
    code: 'DEVICE_MAP_UNSUPPORTED',
    harmless: [undefined, null],
    rule: "a backend has one device, and tensor parallelism places each rank's shard on it",
    remedy: 'drop deviceMap; give every rank a backend of its own device',
  },
  quantizationConfig: {
    code: 'QUANTIZATION_UNSUPPORTED',
    harmless: [undefined, null],
    rule: 'weights are stored as float32, float16 or bfloat16: packed layouts of quantizers cannot be sliced',
    remedy: 'use a checkpoint that is not quantized',
  },
  lowCpuMemUsage: {
    code: 'LOW_CPU_MEM_USAGE_REQUIRED',
    harmless: [undefined, true],
    rule: 'models are built without weights and every rank reads its own slices',
    remedy: 'drop lowCpuMemUsage: false',
  },
  useFlashpack: {
    code: 'FLASHPACK_UNSUPPORTED',
    harmless: [undefined, false],
    rule: 'FlashPack files cannot be sliced per rank',
    remedy: 'use the safetensors files of the checkpoint',
  },
  useSafetensors: {
    code: 'CHECKPOINT_FORMAT',
    harmless: [undefined, null, true],
    rule: 'weights are read from safetensors, of which each rank reads its own slices',
    remedy: 'convert the checkpoint with safe_serialization=True',
  },
  ddufFile: {
    code: 'CHECKPOINT_FORMAT',
    harmless: [undefined, null],
    rule: 'a DDUF file is an archive of a whole pipeline: weights are read from the safetensors files of a folder',
    remedy: 'unpack the archive and load the folder',
  },
  ignoreMismatchedSizes: {
    code: 'MISMATCHED_SIZES_UNSUPPORTED',
    harmless: [undefined, false],
    rule: 'every weight comes from the checkpoint: there is no initialisation to fall back to',
    remedy: 'use the config.json that belongs to the weights',
  },
  offloadFolder: {
    code: 'OFFLOAD_UNSUPPORTED',
    harmless: [undefined, null],
    rule: 'offloading and tensor parallelism both decide where a weight lives',
    remedy: 'drop the option: contiguous shards stay in the mapped file anyway',
  },
  offloadStateDict: {
    code: 'OFFLOAD_UNSUPPORTED',
    harmless: [undefined, null, false],
    rule: 'offloading and tensor parallelism both decide where a weight lives',
    remedy: 'drop the option: no rank ever holds the whole state dict',
  },
  adapters: {
    code: 'ADAPTERS_UNSUPPORTED',
    harmless: [undefined, null],
    rule: ADAPTERS_RULE,
    remedy: 'fuse the adapter into the checkpoint before loading',
  },
}

/**
 * Refuses options that Rankwise does not have, those of diffusers with the reason; nothing has been read yet.
 *
 * @throws RankwiseError `OPTION_UNKNOWN`, `OPTION_INVALID`, `PARALLEL_CONFIG_INVALID`, `CONTEXT_PARALLEL_UNSUPPORTED`, and the codes of
 *   `REFUSED_OPTIONS`
 */
export function checkOptions(model: string, options: FromPretrainedOptions): void {
  for (const [name, value] of Object.entries(options)) {
    if (isKnown(name)) {
      checkType(model, name, value)
      continue
    }
    const refusal = Object.hasOwn(REFUSED_OPTIONS, name) ? REFUSED_OPTIONS[name] : undefined
    if (refusal === undefined) {
      throw new RankwiseError('OPTION_UNKNOWN', `fromPretrained has no option '${name}'`, {
        where: model,
        actual: { known: Object.keys(KNOWN_OPTIONS) },
      })
    }
    if (!refusal.harmless.includes(value)) throw refusedOption(model, name, value, refusal)
  }
  // It alone has no default.
  if (options.backend === undefined) throw invalidOption(model, 'backend', undefined)
  if (options.parallelConfig !== undefined) checkParallelConfig(model, options.parallelConfig)
}

function isKnown(name: string): name is keyof FromPretrainedOptions {
  return Object.hasOwn(KNOWN_OPTIONS, name)
}

/** Not all callers have types: what diffusers calls None would be taken for text. */
function checkType(model: string, name: keyof FromPretrainedOptions, value: unknown): void {
  if (value !== undefined && !KNOWN_OPTIONS[name].accepts(value)) throw invalidOption(model, name, value)
}

/** A value is not quoted: it may be a token. */
function invalidOption(model: string, name: keyof FromPretrainedOptions, value: unknown): RankwiseError {
  return new RankwiseError('OPTION_INVALID', `the option ${name} is no such value`, {
    where: model,
    actual: { [name]: value === null ? 'null' : typeof value },
    rule: `${name} is ${KNOWN_OPTIONS[name].rule}`,
    remedy: name === 'backend' ? 'pass the backend that is to run the model' : `leave ${name} out for its default`,
  })
}

function refusedOption(model: string, name: string, value: unknown, { code, rule, remedy }: Refusal): RankwiseError {
  return new RankwiseError(code, `${name} cannot be used`, {
    where: model,
    actual: { [name]: typeof value === 'object' ? jsonOf(value) : value },
    rule,
    remedy,
  })
}

/** @throws RankwiseError `PARALLEL_CONFIG_INVALID`, `CONTEXT_PARALLEL_UNSUPPORTED` */
export function checkParallelConfig(model: string, config: unknown): void {
  const fields = typeof config === 'object' && config !== null ? Object.keys(config) : []
  if (fields.some((field) => /^(contextParallelConfig|ringDegree|ulyssesDegree)$/.test(field))) {
    throw new RankwiseError('CONTEXT_PARALLEL_UNSUPPORTED', 'context parallelism is not available', {
      where: model,
      actual: { fields },
      rule: 'a model is split by tensor parallelism alone',
    })
  }
  if (config instanceof TensorParallelConfig) return
  throw new RankwiseError('PARALLEL_CONFIG_INVALID', 'parallelConfig is not a TensorParallelConfig', {
    where: model,
    remedy: 'pass new TensorParallelConfig({ tpDegree })',
  })
}

/** Refuses a config.json that says its weights are quantized. @throws RankwiseError `QUANTIZATION_UNSUPPORTED` */
export function checkQuantization(model: string, config: unknown): void {
  if (typeof config !== 'object' || config === null || !('quantization_config' in config)) return
  const value = config.quantization_config
  if (value === null) return
  throw refusedOption(model, 'quantization_config', value, REFUSED_OPTIONS.quantizationConfig as Refusal)
}

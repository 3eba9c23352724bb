import type { Backend, DeviceTensor } from './backend.ts'
import { refuseAdapterWeights } from './checkpoint/foreign-checkpoint.ts'
import type { ShardSource, TensorInfo, WeightSource } from './checkpoint/index.ts'
import { type DType, isFloatingPoint } from './dtype.ts'
import { RankwiseError } from './errors.ts'
import type { Module } from './module.ts'
import type { Parameter } from './parameter.ts'
import { formatPlacement, REPLICATED, shardSlices } from './placement.ts'
import type { ParameterPlacements } from './plan.ts'
import { loadShards } from './shard-loads.ts'
import { sameShape } from './tensor.ts'

/** How far a load has come, in bytes of the checkpoint that this rank loads. */
export interface LoadProgress {
  /** The subfolder or class that is loading. */
  readonly component: string
  /** Never less than before. */
  readonly loadedBytes: number
  readonly totalBytes: number
}

/** What `loadWeights` needs to know beside the checkpoint and the model. */
export interface LoadWeightsOptions {
  readonly placements: ParameterPlacements
  readonly rank: number
  readonly tpDegree: number
  readonly backend: Backend
  readonly dtype: DType
  readonly component: string
  readonly ignored: readonly RegExp[]
  /** As `ModelClass.tiedWeights`. */
  readonly tied?: Readonly<Record<string, string>>
  readonly signal: AbortSignal | undefined
  /** Called after every weight. */
  readonly onProgress: ((progress: LoadProgress) => void) | undefined
}

/** What loading a model took on one rank. */
export interface LoadReport {
  /** Bytes of this rank's shards, in the checkpoint's dtypes. */
  readonly localBytes: number
  /** Bytes of the whole weights. */
  readonly fullBytes: number
  /** Bytes that loading read from the weight files, headers not counted. */
  readonly readBytes: number
  /** Bytes of this rank's shards that the backend left in the files: it maps them, and loading reads none of them. */
  readonly mappedBytes: number
  /** Bytes of the largest buffer that was allocated for reading each weight, by name. */
  readonly largestBuffers: ReadonlyMap<string, number>
}

/** A rank's weights and what loading them took. */
export interface LoadedWeights {
  /** This rank's shard of every weight. Tied ones share a tensor where they are placed alike. */
  readonly weights: ReadonlyMap<string, DeviceTensor>
  /** What of the checkpoint each of them is. */
  readonly stored: ReadonlyMap<DeviceTensor, StoredShard>
  readonly report: LoadReport
}

/** A rank's part of a weight, as the checkpoint has it. */
export interface StoredShard {
  /** In the checkpoint's dtype. */
  readonly byteLength: number
  /** Whether the backend left it in the file. */
  readonly isMapped: boolean
}

/**
 * Loads this rank's shard of every parameter of a model, in the order of the files and a few at a time. All names,
 * shapes and dtypes are compared with the headers before the first weight is read. When a weight fails, those that are
 * under way are waited for and everything that was loaded is freed; of several failures, the first in the order of the
 * files is thrown.
 *
 * @throws RankwiseError `ADAPTERS_UNSUPPORTED`, `WEIGHTS_MISSING`, `WEIGHTS_SHAPE`, `WEIGHTS_DTYPE`, `ABORTED`, and those of the reader
 */
export async function loadWeights(
  checkpoint: WeightSource,
  model: Module,
  options: LoadWeightsOptions,
): Promise<LoadedWeights> {
  const { backend, dtype, component, signal, onProgress } = options
  const parameters = new Map(model.namedParameters())
  const tensors = tensorNames(checkpoint, parameters, options.tied ?? {})
  checkNames(checkpoint, tensors, options)
  checkTypes(checkpoint, parameters, tensors)

  const shards = plannedShards(checkpoint, tensors, options)
  backend.requireRoom?.(shards.map(({ source }) => source))
  const totalBytes = bytesOf(shards.map(({ source }) => source))
  const readBefore = checkpoint.stats.bytesRead
  const loaded = await loadShards(
    shards.map(({ source }) => source),
    { backend, dtype, signal, onLoaded: (loadedBytes) => onProgress?.({ component, loadedBytes, totalBytes }) },
  )
  const weights = new Map<string, DeviceTensor>()
  for (const [i, { weight }] of loaded.entries()) {
    for (const parameter of shards[i]?.parameters ?? []) weights.set(parameter, weight)
  }
  const stored = loaded.map(
    ({ source, weight, wasRead }) => [weight, { byteLength: source.byteLength, isMapped: !wasRead }] as const,
  )
  return {
    weights: new Map([...parameters.keys()].map((name) => [name, weights.get(name) as DeviceTensor])),
    stored: new Map(stored),
    report: {
      ...heldBytes(stored.map(([, shard]) => shard)),
      fullBytes: bytesOf([...new Set(tensors.values())].map((name) => infoOf(checkpoint, name))),
      readBytes: checkpoint.stats.bytesRead - readBefore,
      largestBuffers: checkpoint.stats.largestBuffers,
    },
  }
}

/** The bytes that a rank has by now. */
export function heldBytes(shards: readonly StoredShard[]): Pick<LoadReport, 'localBytes' | 'mappedBytes'> {
  return { localBytes: bytesOf(shards), mappedBytes: bytesOf(shards.filter(({ isMapped }) => isMapped)) }
}

/** A shard and the parameters it is the value of: several where they are tied and placed alike. */
interface PlannedShard {
  readonly source: ShardSource
  readonly info: TensorInfo
  readonly parameters: string[]
}

/** In the order of the files, in which the disk and the page cache give them fastest. */
function plannedShards(
  checkpoint: WeightSource,
  tensors: ReadonlyMap<string, string>,
  { placements, rank, tpDegree }: LoadWeightsOptions,
): readonly PlannedShard[] {
  const shards = new Map<string, PlannedShard>()
  for (const [parameter, tensor] of tensors) {
    const placement = placements.get(parameter)?.placement ?? REPLICATED
    const key = `${formatPlacement(placement)} ${tensor}`
    const shard = shards.get(key) ?? {
      source: checkpoint.source(tensor, shardSlices(placement, rank, tpDegree)),
      info: infoOf(checkpoint, tensor),
      parameters: [],
    }
    shard.parameters.push(parameter)
    shards.set(key, shard)
  }
  return [...shards.values()].sort((a, b) => compareFiles(a.info, b.info) || a.info.byteOffset - b.info.byteOffset)
}

function compareFiles(a: TensorInfo, b: TensorInfo): number {
  if (a.file === b.file) return 0
  return a.file < b.file ? -1 : 1
}

function bytesOf(tensors: readonly { readonly byteLength: number }[]): number {
  return tensors.reduce((sum, { byteLength }) => sum + byteLength, 0)
}

/** The name of every parameter in the checkpoint: its own, or else that of one it is tied to, if either is there. */
function tensorNames(
  { tensors }: WeightSource,
  parameters: ReadonlyMap<string, Parameter>,
  tied: Readonly<Record<string, string>>,
): ReadonlyMap<string, string> {
  const targets = new Map(Object.entries(tied))
  const nameOf = (parameter: string) => {
    const target = targets.get(parameter) ?? parameter
    const aliases = [...targets.keys()].filter((alias) => targets.get(alias) === target)
    return [parameter, target, ...aliases].find((name) => tensors.has(name)) ?? parameter
  }
  return new Map([...parameters.keys()].map((parameter) => [parameter, nameOf(parameter)]))
}

/** @throws RankwiseError `ADAPTERS_UNSUPPORTED`, `WEIGHTS_MISSING` naming all; other weights are only warned of */
function checkNames(
  checkpoint: WeightSource,
  tensors: ReadonlyMap<string, string>,
  { ignored, component }: LoadWeightsOptions,
): void {
  refuseAdapterWeights(checkpoint.location, [...checkpoint.tensors.keys()])
  const missing = [...tensors].filter(([, tensor]) => !checkpoint.tensors.has(tensor)).map(([parameter]) => parameter)
  if (missing.length > 0) {
    throw new RankwiseError('WEIGHTS_MISSING', `the checkpoint lacks ${missing.length} weights of the model`, {
      where: checkpoint.location,
      actual: { missing },
      rule: 'every parameter of the model is in the checkpoint, under its own name or that of one it is tied to',
      remedy: 'check that config.json belongs to these weight files',
    })
  }
  const used = new Set([...tensors].flat())
  const unexpected = [...checkpoint.tensors.keys()].filter(
    (name) => !used.has(name) && !ignored.some((pattern) => pattern.test(name)),
  )
  if (unexpected.length > 0) {
    process.emitWarning(`${component}: the checkpoint has weights the model does not use: ${unexpected.join(', ')}`, {
      code: 'WEIGHTS_UNEXPECTED',
    })
  }
}

function checkTypes(
  checkpoint: WeightSource,
  parameters: ReadonlyMap<string, Parameter>,
  tensors: ReadonlyMap<string, string>,
): void {
  for (const [name, parameter] of parameters) {
    const tensor = tensors.get(name) ?? name
    const { dtype, shape } = infoOf(checkpoint, tensor)
    if (!sameShape(shape, parameter.shape)) {
      throw new RankwiseError('WEIGHTS_SHAPE', 'the checkpoint has another shape than the config', {
        where: `${checkpoint.location}: ${tensor}`,
        actual: { checkpoint: shape, config: parameter.shape },
        rule: 'a checkpoint stores whole weights, of the shapes that its config.json implies',
      })
    }
    if (!isFloatingPoint(dtype)) {
      throw new RankwiseError('WEIGHTS_DTYPE', `the weight is stored as ${dtype}`, {
        where: `${checkpoint.location}: ${tensor}`,
        rule: 'weights are stored as float32, float16 or bfloat16',
      })
    }
  }
}

function infoOf(checkpoint: WeightSource, name: string): TensorInfo & { readonly dtype: DType } {
  const info = checkpoint.tensors.get(name)
  if (info === undefined) throw new RankwiseError('WEIGHTS_MISSING', 'the checkpoint lacks the weight', { where: name })
  return info as TensorInfo & { readonly dtype: DType }
}

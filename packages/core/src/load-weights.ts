import { throwIfAborted } from './abort.ts'
import type { Backend, DeviceTensor } from './backend.ts'
import type { ShardSource, TensorInfo, WeightSource } from './checkpoint/index.ts'
import { type DType, isFloatingPoint } from './dtype.ts'
import { RankwiseError } from './errors.ts'
import type { Module } from './module.ts'
import type { Parameter } from './parameter.ts'
import { REPLICATED, shardSlices } from './placement.ts'
import type { ParameterPlacements } from './plan.ts'
import { sameShape } from './tensor.ts'

/** How far a load has come, in bytes of the checkpoint that this rank reads. */
export interface LoadProgress {
  /** The subfolder or class that is loading. */
  readonly component: string
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
  /** Bytes read from the weight files, headers not counted. */
  readonly readBytes: number
  /** Bytes of the largest buffer that was allocated for reading each weight, by name. */
  readonly largestBuffers: ReadonlyMap<string, number>
}

/** A rank's weights and what loading them took. */
export interface LoadedWeights {
  /** This rank's shard of every weight. */
  readonly weights: ReadonlyMap<string, DeviceTensor>
  readonly report: LoadReport
}

/**
 * Loads this rank's shard of every parameter of a model. All names, shapes and dtypes are compared with the headers
 * before the first weight is read; what was loaded is freed again when a later weight fails.
 *
 * @throws RankwiseError `WEIGHTS_MISSING`, `WEIGHTS_SHAPE`, `WEIGHTS_DTYPE`, `ABORTED`, and those of the reader
 */
export async function loadWeights(
  checkpoint: WeightSource,
  model: Module,
  options: LoadWeightsOptions,
): Promise<LoadedWeights> {
  const { backend, dtype, component, signal, onProgress } = options
  const parameters = new Map(model.namedParameters())
  checkNames(checkpoint, parameters, options)
  checkTypes(checkpoint, parameters)
  const sources = [...parameters.keys()].map((name) => shardSource(checkpoint, name, options))
  const totalBytes = sources.reduce((sum, source) => sum + source.byteLength, 0)
  const weights = new Map<string, DeviceTensor>()
  let loadedBytes = 0
  try {
    for (const source of sources) {
      throwIfAborted(signal)
      weights.set(source.name, await backend.loadShard(source, { dtype, signal }))
      loadedBytes += source.byteLength
      onProgress?.({ component, loadedBytes, totalBytes })
    }
  } catch (error) {
    for (const weight of weights.values()) weight.dispose()
    throw error
  }
  const fullBytes = [...parameters.keys()].reduce((sum, name) => sum + infoOf(checkpoint, name).byteLength, 0)
  const { bytesRead, largestBuffers } = checkpoint.stats
  return { weights, report: { localBytes: totalBytes, fullBytes, readBytes: bytesRead, largestBuffers } }
}

function shardSource(
  checkpoint: WeightSource,
  name: string,
  { placements, rank, tpDegree }: LoadWeightsOptions,
): ShardSource {
  return checkpoint.source(name, shardSlices(placements.get(name)?.placement ?? REPLICATED, rank, tpDegree))
}

function checkNames(
  checkpoint: WeightSource,
  parameters: ReadonlyMap<string, Parameter>,
  { ignored, component }: LoadWeightsOptions,
): void {
  const missing = [...parameters.keys()].filter((name) => !checkpoint.tensors.has(name))
  if (missing.length > 0) {
    throw new RankwiseError('WEIGHTS_MISSING', `the checkpoint lacks ${missing.length} weights of the model`, {
      where: checkpoint.location,
      actual: { missing },
      rule: 'every parameter of the model is in the checkpoint',
      remedy: 'check that config.json belongs to these weight files',
    })
  }
  const unexpected = [...checkpoint.tensors.keys()].filter(
    (name) => !parameters.has(name) && !ignored.some((pattern) => pattern.test(name)),
  )
  if (unexpected.length > 0) {
    process.emitWarning(`${component}: the checkpoint has weights the model does not use: ${unexpected.join(', ')}`, {
      code: 'WEIGHTS_UNEXPECTED',
    })
  }
}

function checkTypes(checkpoint: WeightSource, parameters: ReadonlyMap<string, Parameter>): void {
  for (const [name, parameter] of parameters) {
    const { dtype, shape } = infoOf(checkpoint, name)
    if (!sameShape(shape, parameter.shape)) {
      throw new RankwiseError('WEIGHTS_SHAPE', 'the checkpoint has another shape than the config', {
        where: `${checkpoint.location}: ${name}`,
        actual: { checkpoint: shape, config: parameter.shape },
        rule: 'a checkpoint stores whole weights, of the shapes that its config.json implies',
      })
    }
    if (!isFloatingPoint(dtype)) {
      throw new RankwiseError('WEIGHTS_DTYPE', `the weight is stored as ${dtype}`, {
        where: `${checkpoint.location}: ${name}`,
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

import { throwIfAborted } from './abort.ts'
import type { Backend, DeviceTensor } from './backend.ts'
import type { DType } from './dtype.ts'
import { heldBytes, type LoadedWeights, type LoadProgress, type StoredShard } from './load-weights.ts'
import { MemoryWeights } from './memory-weights.ts'
import { shardSlices } from './placement.ts'
import type { ParameterPlacements } from './plan.ts'
import { loadShards } from './shard-loads.ts'
import { sizeOf } from './tensor.ts'

/** Options of `enableParallelism`. */
export interface SplitOptions {
  /** Aborts with `ABORTED`; the model stays whole. */
  readonly signal?: AbortSignal | undefined
  /** Called after every weight that is split. */
  readonly onProgress?: (progress: LoadProgress) => void
}

interface SplitTarget extends SplitOptions {
  readonly placements: ParameterPlacements
  readonly rank: number
  readonly tpDegree: number
}

interface WholeWeights extends LoadedWeights {
  readonly backend: Backend
  readonly dtype: DType
}

/**
 * This rank's shards of weights that are loaded whole. Weights that the plan does not split are taken over as they are;
 * the whole ones stay until the caller frees them.
 */
export async function splitWeights(
  component: string,
  whole: WholeWeights,
  { placements, rank, tpDegree, signal, onProgress }: SplitTarget,
): Promise<LoadedWeights> {
  throwIfAborted(signal, component)
  const { backend, dtype, weights, report } = whole
  await using memory = new MemoryWeights(component, backend, weights)
  const sources = [...placements].flatMap(([name, { placement }]) => {
    const slices = shardSlices(placement, rank, tpDegree)
    return slices === undefined ? [] : [memory.source(name, slices)]
  })
  const totalBytes = sources.reduce((sum, { byteLength }) => sum + byteLength, 0)
  const onLoaded = (loadedBytes: number) => onProgress?.({ component, loadedBytes, totalBytes })
  const loaded = await loadShards(sources, { backend, dtype, signal, onLoaded })
  const split = new Map([...weights, ...loaded.map(({ source, weight }) => [source.name, weight] as const)])
  const stored = new Map(
    [...split].map(([name, weight]) => [weight, storedAs(weight, weights.get(name) as DeviceTensor, whole.stored)]),
  )
  return { weights: split, stored, report: { ...report, ...heldBytes([...stored.values()]) } }
}

/** A weight that is not split stays where it is. */
function storedAs(weight: DeviceTensor, whole: DeviceTensor, stored: LoadedWeights['stored']): StoredShard {
  const origin = stored.get(whole) as StoredShard
  if (weight === whole) return origin
  return { byteLength: (origin.byteLength * sizeOf(weight.shape)) / sizeOf(whole.shape), isMapped: false }
}

import { join } from 'node:path'
import { Checkpoint } from '../checkpoint/checkpoint.ts'
import type { WeightSource } from '../checkpoint/shard-source.ts'
import { RankwiseError } from '../errors.ts'
import { HubCheckpoint, type HubCheckpointOptions } from './hub-checkpoint.ts'
import type { DownloadOptions, HubRepository } from './hub-repository.ts'

/**
 * How weights come from a hub: `'snapshot'` brings whole files into the cache, where later loads find them; `'shards'`
 * fetches only what this rank holds, into memory.
 */
export type DownloadMode = 'snapshot' | 'shards'

/** Options of `openWeights`. */
export interface OpenWeightsOptions extends HubCheckpointOptions, DownloadOptions {
  /** @default 'snapshot' */
  readonly download?: DownloadMode | undefined
}

/**
 * Opens the weights of a model in a repository. Weights that are in the cache are read from there, whatever the mode.
 *
 * @throws RankwiseError `HUB_OPTION` for an unknown mode, and as `HubRepository.download`, `Checkpoint.open` and `HubCheckpoint.open`
 */
export async function openWeights(repository: HubRepository, options: OpenWeightsOptions = {}): Promise<WeightSource> {
  const { subfolder = '', weightsName = 'diffusion_pytorch_model', download = 'snapshot', signal, onProgress } = options
  checkMode(download)
  const place = { folder: subfolder, weightsName }
  // Offline, the snapshot says all that is missing.
  if (download === 'shards' && !repository.isOffline) {
    const { files } = await repository.weightFiles(place, { signal })
    const absent = await repository.notCached(files)
    if (absent.length > 0) return HubCheckpoint.open(repository, options)
  }
  const selection = { folders: [subfolder], weightsNames: [weightsName] }
  const snapshot = await repository.download(selection, { signal, onProgress })
  return Checkpoint.open(join(snapshot, subfolder), { weightsName })
}

function checkMode(download: string): void {
  if (download === 'snapshot' || download === 'shards') return
  throw new RankwiseError('HUB_OPTION', 'there is no such way of downloading', {
    actual: { download },
    rule: "download is 'snapshot' or 'shards'",
  })
}

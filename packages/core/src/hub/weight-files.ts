import { join } from 'node:path'
import { requireSafetensors } from '../checkpoint/checkpoint-files.ts'
import { readCheckpointIndex } from '../checkpoint/checkpoint-index.ts'
import type { FileListing } from './file-listing.ts'
import { indexPath, pathIn } from './file-selection.ts'
import { hubPlace } from './hub-error.ts'
import type { HubFile } from './remote-file.ts'
import { checkFileName } from './repo-id.ts'

/** Which weights of a repository are meant. */
export interface WeightsPlace {
  /** Within the repository; '' for its root. */
  readonly folder: string
  /** Without `.safetensors`. */
  readonly weightsName: string
}

/** The safetensors files of one model. */
export interface WeightFiles {
  readonly files: readonly HubFile[]
  /** Files that the index names and the repository lacks. */
  readonly missing: readonly string[]
  /** Names of the tensors, by file; undefined for weights in one file. */
  readonly index: ReadonlyMap<string, ReadonlySet<string>> | undefined
}

/** What `findWeightFiles` looks at. */
export interface WeightsSnapshot {
  readonly repo: string
  readonly listing: FileListing
  /** Folder of the snapshot, with the index already in it. */
  readonly snapshot: string
}

/**
 * Finds the weights of a model: those that an index names, or else the one file. Variants, such as
 * `model.fp16.safetensors`, are others.
 *
 * @throws RankwiseError `CHECKPOINT_INDEX`, `CHECKPOINT_FORMAT`, `HUB_FILE_NAME` when the index names files elsewhere
 */
export async function findWeightFiles(
  { repo, listing, snapshot }: WeightsSnapshot,
  { folder, weightsName }: WeightsPlace,
): Promise<WeightFiles> {
  const indexFile = listing.get(indexPath(folder, weightsName))
  if (indexFile === undefined) {
    const single = listing.get(pathIn(folder, `${weightsName}.safetensors`))
    return { files: single === undefined ? [] : [single], missing: [], index: undefined }
  }
  const index = await readCheckpointIndex(join(snapshot, ...indexFile.path.split('/')))
  const names = [...index.keys()]
  requireSafetensors(hubPlace({ repo, file: indexFile.path }), names)
  const files: HubFile[] = []
  const missing: string[] = []
  for (const name of names) {
    checkFileName(repo, name)
    const file = listing.get(pathIn(folder, name))
    if (file === undefined) missing.push(pathIn(folder, name))
    else files.push(file)
  }
  return { files, missing, index }
}

import { randomBytes } from 'node:crypto'
import { stat } from 'node:fs/promises'
import { resolve } from 'node:path'
import { throwIfAborted } from '../abort.ts'
import type { Collectives } from '../collectives.ts'
import { REPLICATED, shardSlices } from '../placement.ts'
import type { ParameterPlacements } from '../plan.ts'
import type { Tensor } from '../tensor.ts'
import { onDisk } from './disk-error.ts'
import { RankAgreement } from './rank-agreement.ts'
import { SafetensorsWriter } from './safetensors-writer.ts'
import { checkConfig, countProgress, type SaveOptions, writeText } from './save-options.ts'
import {
  formatManifest,
  metadataOfRank,
  type SavedParameter,
  type ShardManifest,
  tensorsOfRank,
} from './shard-manifest.ts'
import { ShardedCheckpoint } from './sharded-checkpoint.ts'
import { replacedFiles, StagedFiles } from './staged-files.ts'
import { CONFIG_FILE, manifestFile, rankFile } from './weight-files.ts'

/** Options of `saveShards`; all ranks give the same, except for `read`, `signal` and `onProgress`. */
export interface SaveShardsOptions extends SaveOptions {
  /** How the weights lie over the ranks; those not named are replicated. */
  readonly placements: ParameterPlacements
  /** The ranks that hold the model together; undefined when this one holds all of it. */
  readonly collectives: Collectives | undefined
  /** This rank's shard of a weight. One at a time is asked for and kept; rank 0 alone is asked for replicated ones. */
  readonly read: (name: string) => Promise<Tensor>
}

const SAVE_ID_BYTES = 16

/**
 * Saves a model as its ranks hold it: each writes its own shards, rank 0 replicated weights, `config.json` and a
 * manifest. `ShardedCheckpoint` reads them back at any degree. All ranks call it, with a folder that they share.
 *
 * The files of all ranks appear at the very end and together, once they are seen to belong together; when one rank
 * fails, all do, and the folder is as it was. Shards of an earlier save under the same name are replaced.
 *
 * @param directory Folder of the model; made when there is none.
 * @throws RankwiseError `CONFIG_INVALID`, `BLOCK_NOT_DIVISIBLE`, `SAVE_TARGET` when something is in the way,
 *   `SAFETENSORS_NAME`, `SAFETENSORS_HEADER_LENGTH`, `SAVE_TENSOR` when a weight is not what was announced,
 *   `SAVE_FAILED` when the file system refuses, `SAVE_ROLLBACK`, `ABORTED`, what `read` throws, the code of whichever
 *   rank failed, and those of `Collectives`
 */
export async function saveShards(directory: string, options: SaveShardsOptions): Promise<void> {
  const { config, weightsName, collectives, signal } = options
  const root = resolve(directory)
  const ranks = new RankAgreement(collectives)
  const isFirst = ranks.rank === 0
  const parameters = savedParameters(options, ranks.worldSize)
  const saveId = Buffer.from(await ranks.fromFirst(randomBytes(SAVE_ID_BYTES))).toString('hex')
  const content: SavedContent = { saveId, tpDegree: ranks.worldSize, parameters }
  const staged = new StagedFiles(root, saveId)
  let replaced: readonly string[] = []
  try {
    await ranks.step(async () => {
      checkConfig(config, root)
      throwIfAborted(signal, root)
      if (!isFirst) return
      replaced = await replacedFiles(root, weightsName, 'shards')
      await staged.prepare()
    })
    await writeShards(staged, content, ranks, options)
    await ranks.step(async () => {
      if (isFirst) await writeManifest(staged, content, options)
      throwIfAborted(signal, root)
    })
  } catch (error) {
    await staged.discard()
    throw error
  }
  // From here on what is staged is rank 0's alone: it may hold the files that are replaced.
  await ranks.step(() => (isFirst ? commit(staged, replaced, content, weightsName) : undefined))
}

/** What is saved, before there are files. */
type SavedContent = Omit<ShardManifest, 'files'>

function savedParameters(
  { tensors, placements }: SaveShardsOptions,
  tpDegree: number,
): ReadonlyMap<string, SavedParameter> {
  const parameters = new Map<string, SavedParameter>()
  for (const [name, { dtype, shape }] of tensors) {
    const placement = placements.get(name)?.placement ?? REPLICATED
    if (placement.kind === 'shard') shardSlices(placement, 0, tpDegree)
    parameters.set(name, { dtype, shape, placement: placement.kind === 'shard' ? placement : REPLICATED })
  }
  return parameters
}

/** Writes this rank's file. After every weight the ranks agree to go on, so that a failure soon stops all of them. */
async function writeShards(
  staged: StagedFiles,
  content: SavedContent,
  ranks: RankAgreement,
  options: SaveShardsOptions,
): Promise<void> {
  const { weightsName, read, signal } = options
  const tensors = tensorsOfRank(content, ranks.rank)
  const path = staged.path(rankFile(weightsName, ranks.rank, content.tpDegree))
  const metadata = metadataOfRank(content, ranks.rank)
  const onBytes = countProgress(tensors, options)
  await using writer = await ranks.step(
    () => SafetensorsWriter.create(path, tensors, { metadata, signal, onBytes }),
    (created) => created[Symbol.asyncDispose](),
  )
  for (let i = 0; i < content.parameters.size; i++) {
    await ranks.step(async () => {
      const name = writer.names[i]
      if (name !== undefined) await writer.write(name, await read(name))
    })
  }
  await ranks.step(() => writer.finish())
}

/** Writes what is beside the ranks' files, and opens them all as a reader would. */
async function writeManifest(
  staged: StagedFiles,
  content: SavedContent,
  { config, weightsName, signal }: SaveShardsOptions,
): Promise<void> {
  const files = rankFiles(weightsName, content.tpDegree).map(async (name) => {
    const path = staged.path(name)
    return { name, bytes: (await onDisk(path, () => stat(path))).size }
  })
  const manifest = formatManifest({ ...content, files: await Promise.all(files) })
  await writeText(staged.path(CONFIG_FILE), config, signal)
  await writeText(staged.path(manifestFile(weightsName)), manifest, signal)
  await using _ = await ShardedCheckpoint.open(staged.stage, { weightsName })
}

async function commit(
  staged: StagedFiles,
  replaced: readonly string[],
  { tpDegree }: SavedContent,
  weightsName: string,
): Promise<void> {
  try {
    await staged.commit(replaced, [CONFIG_FILE, ...rankFiles(weightsName, tpDegree), manifestFile(weightsName)])
  } catch (error) {
    await staged.discard()
    throw error
  }
}

function rankFiles(weightsName: string, tpDegree: number): readonly string[] {
  return Array.from({ length: tpDegree }, (_, rank) => rankFile(weightsName, rank, tpDegree))
}

import { readdir } from 'node:fs/promises'
import { resolve } from 'node:path'
import { Checkpoint, type CheckpointOptions } from '../checkpoint/checkpoint.ts'
import type { WeightSource } from '../checkpoint/shard-source.ts'
import { RankwiseError } from '../errors.ts'
import { ShardedCheckpoint } from './sharded-checkpoint.ts'
import { manifestFile, weightFilesAmong } from './weight-files.ts'

/**
 * Opens the weights in a folder, whichever way they were saved: whole, or as shards of ranks.
 *
 * @throws RankwiseError `CHECKPOINT_AMBIGUOUS` when the folder holds both, and those of `Checkpoint.open` and
 *   `ShardedCheckpoint.open`
 */
export async function openWeights(directory: string, options: CheckpointOptions = {}): Promise<WeightSource> {
  const { weightsName = 'diffusion_pytorch_model' } = options
  const root = resolve(directory)
  // A folder that cannot be listed is for `Checkpoint.open` to refuse, with everything it looks for.
  const entries: readonly string[] = await readdir(root).catch(() => [])
  if (!entries.includes(manifestFile(weightsName))) return Checkpoint.open(root, options)
  const whole = weightFilesAmong(entries, weightsName, 'whole')
  if (whole.length > 0) {
    throw new RankwiseError('CHECKPOINT_AMBIGUOUS', 'the folder holds the weights twice', {
      where: root,
      actual: { shards: manifestFile(weightsName), whole },
      rule: 'a folder holds the weights of a model either whole or as shards of ranks',
      remedy: 'move one of them to another folder',
    })
  }
  return ShardedCheckpoint.open(root, { weightsName })
}

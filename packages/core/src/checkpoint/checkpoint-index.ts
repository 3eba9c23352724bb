import { readFile, stat } from 'node:fs/promises'
import { RankwiseError } from '../errors.ts'
import { isJsonObject, parseStrictJson, quoteName } from './strict-json.ts'

/** Names of a sharded checkpoint's tensors, by the file they are in. */
export type CheckpointIndex = ReadonlyMap<string, ReadonlySet<string>>

/** As long as a header may be. */
const MAX_INDEX_BYTES = 100_000_000

/**
 * Reads `<weights>.safetensors.index.json`. What its `metadata` says is not used: `total_size` differs between writers.
 *
 * @throws RankwiseError `CHECKPOINT_INDEX` when it is no index of at least one tensor
 */
export async function readCheckpointIndex(path: string): Promise<CheckpointIndex> {
  const json = parseStrictJson(await readText(path), {
    where: path,
    syntaxCode: 'CHECKPOINT_INDEX',
    duplicateCode: 'CHECKPOINT_INDEX',
    maxDepth: 16,
  })
  const weightMap = isJsonObject(json) ? json.weight_map : undefined
  if (!isJsonObject(weightMap)) throw malformed(path, 'there is no weight_map')
  const files = new Map<string, Set<string>>()
  for (const tensor of Object.keys(weightMap)) {
    const file = weightMap[tensor]
    if (typeof file !== 'string') throw malformed(path, `the file of ${quoteName(tensor)} is no string`)
    const tensors = files.get(file) ?? new Set()
    files.set(file, tensors.add(tensor))
  }
  if (files.size === 0) throw malformed(path, 'the weight_map is empty')
  return files
}

async function readText(path: string): Promise<string> {
  try {
    const file = await stat(path)
    // Opening a FIFO would wait for a writer.
    if (!file.isFile()) throw new Error('not a regular file')
    if (file.size > MAX_INDEX_BYTES) throw new Error(`it has ${file.size} bytes, more than ${MAX_INDEX_BYTES}`)
    return await readFile(path, 'utf8')
  } catch (cause) {
    throw new RankwiseError('CHECKPOINT_INDEX', 'the index cannot be read', {
      where: path,
      actual: { problem: (cause as Error).message },
      cause,
    })
  }
}

function malformed(path: string, problem: string): RankwiseError {
  return new RankwiseError('CHECKPOINT_INDEX', 'the index is malformed', {
    where: path,
    actual: { problem },
    rule: 'an index has a weight_map from tensor names to file names',
  })
}

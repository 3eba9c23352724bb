import { readFile } from 'node:fs/promises'
import { z } from 'zod'
import { RankwiseError } from '../errors.ts'
import { parseStrictJson, quoteName } from './strict-json.ts'

/** Names of a sharded checkpoint's tensors, by the file they are in. */
export type CheckpointIndex = ReadonlyMap<string, ReadonlySet<string>>

const INDEX = z.object({ weight_map: z.record(z.string(), z.string()) })

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
  const parsed = INDEX.safeParse(json)
  if (!parsed.success) {
    const issue = parsed.error.issues[0]
    throw malformed(path, `${quoteName(issue?.path.join('.') ?? '')}: ${issue?.message}`)
  }
  const files = new Map<string, Set<string>>()
  for (const [tensor, file] of Object.entries(parsed.data.weight_map)) {
    const tensors = files.get(file) ?? new Set()
    files.set(file, tensors.add(tensor))
  }
  if (files.size === 0) throw malformed(path, 'the weight_map is empty')
  return files
}

async function readText(path: string): Promise<string> {
  try {
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

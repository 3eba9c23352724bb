import { randomBytes } from 'node:crypto'
import { resolve } from 'node:path'
import { throwIfAborted } from '../abort.ts'
import type { TensorType } from '../graph.ts'
import type { Tensor } from '../tensor.ts'
import { SafetensorsWriter } from './safetensors-writer.ts'
import { bytesOf, checkConfig, countProgress, type SaveOptions, writeText } from './save-options.ts'
import { DEFAULT_MAX_SHARD_SIZE, parseShardSize } from './shard-size.ts'
import { splitIntoFiles } from './split-files.ts'
import { replacedFiles, StagedFiles } from './staged-files.ts'
import { CONFIG_FILE, indexFile, numberedFile, singleFile } from './weight-files.ts'

/** Options of `saveModel`. */
export interface SaveModelOptions extends SaveOptions {
  /**
   * Largest weight file, without its header: bytes, or a string such as '5GB'. A tensor that is larger gets a file of
   * its own.
   * @default '10GB'
   */
  readonly maxShardSize?: number | string | undefined
  /** A weight, whole. One at a time is asked for and kept. */
  readonly read: (name: string) => Promise<Tensor>
}

/**
 * Saves a model as `save_pretrained` of diffusers does: `config.json`, and the weights in one safetensors file or in
 * several with an index, byte for byte those that diffusers writes. Weights of an earlier save under the same name are
 * replaced at the very end; when the save fails, the folder is as it was.
 *
 * @param directory Folder of the model; made when there is none.
 * @throws RankwiseError `SAVE_SHARD_SIZE`, `CONFIG_INVALID`, `SAVE_TARGET` when something is in the way,
 *   `SAFETENSORS_NAME`, `SAFETENSORS_HEADER_LENGTH`, `SAVE_TENSOR` when a weight is not what was announced,
 *   `SAVE_FAILED` when the file system refuses, `SAVE_ROLLBACK`, `ABORTED`, and what `read` throws
 */
export async function saveModel(directory: string, options: SaveModelOptions): Promise<void> {
  const root = resolve(directory)
  const { config, weightsName, tensors, maxShardSize = DEFAULT_MAX_SHARD_SIZE, signal } = options
  const files = namedFiles(splitIntoFiles(tensors, parseShardSize(maxShardSize)), weightsName)
  checkConfig(config, root)
  throwIfAborted(signal, root)
  const replaced = await replacedFiles(root, weightsName, 'whole')

  const staged = new StagedFiles(root, randomBytes(8).toString('hex'))
  try {
    await staged.prepare()
    await writeText(staged.path(CONFIG_FILE), config, signal)
    await writeWeights(staged, files, options)
    const added = [CONFIG_FILE, ...files.keys()]
    if (files.size > 1) {
      const index = indexFile(weightsName)
      await writeText(staged.path(index), indexText(files, tensors), signal)
      added.push(index)
    }
    throwIfAborted(signal, root)
    await staged.commit(replaced, added)
  } catch (error) {
    await staged.discard()
    throw error
  }
}

/** Names of the tensors in each file, by its name. */
type Files = ReadonlyMap<string, readonly string[]>

function namedFiles(files: readonly (readonly string[])[], weightsName: string): Files {
  const count = files.length
  return new Map(
    files.map((names, i) => [count === 1 ? singleFile(weightsName) : numberedFile(weightsName, i, count), names]),
  )
}

async function writeWeights(staged: StagedFiles, files: Files, options: SaveModelOptions): Promise<void> {
  const { tensors, read, signal } = options
  const onBytes = countProgress(tensors, options)
  for (const [fileName, names] of files) {
    const types = new Map(names.map((name) => [name, tensors.get(name) as TensorType]))
    await using writer = await SafetensorsWriter.create(staged.path(fileName), types, {
      metadata: { format: 'pt' },
      signal,
      onBytes,
    })
    for (const name of writer.names) await writer.write(name, await read(name))
    await writer.finish()
  }
}

/** The text that `json.dumps(index, indent=2, sort_keys=True)` gives, and a newline. */
function indexText(files: Files, tensors: ReadonlyMap<string, TensorType>): string {
  const places = [...files].flatMap(([fileName, names]) => names.map((name) => [name, fileName] as const))
  const weightMap = Object.fromEntries(places.sort(([a], [b]) => Buffer.compare(Buffer.from(a), Buffer.from(b))))
  return `${JSON.stringify({ metadata: { total_size: bytesOf(tensors) }, weight_map: weightMap }, undefined, 2)}\n`
}

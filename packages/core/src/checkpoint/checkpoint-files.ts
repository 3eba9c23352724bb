import { readdir, realpath } from 'node:fs/promises'
import { basename, dirname, isAbsolute, relative, resolve, sep, win32 } from 'node:path'
import { RankwiseError } from '../errors.ts'
import { quoteName } from './strict-json.ts'

/** Weights in other formats: they can run code when loaded, or lay tensors out differently. */
const OTHER_FORMATS = /\.(bin|ckpt|dduf|flashpack|gguf|h5|msgpack|npz|onnx|pkl|pt|pth)(\.index\.json)?$/

/** What `Checkpoint.open` starts from. */
export interface WeightsEntry {
  readonly kind: 'index' | 'file'
  /** Within the folder. */
  readonly fileName: string
}

/**
 * Looks for `<weightsName>.safetensors.index.json`, then for `<weightsName>.safetensors`; diffusers takes them in the
 * same order.
 *
 * @throws RankwiseError `CHECKPOINT_NOT_FOUND`, or `CHECKPOINT_FORMAT` when there are only weights of other formats
 */
export async function findWeights(directory: string, weightsName: string): Promise<WeightsEntry> {
  return chooseWeights(directory, await listDirectory(directory), weightsName)
}

/**
 * As `findWeights`, of the names of a folder's entries.
 *
 * @throws RankwiseError `CHECKPOINT_NOT_FOUND`, `CHECKPOINT_FORMAT`
 */
export function chooseWeights(directory: string, entries: readonly string[], weightsName: string): WeightsEntry {
  const fileName = `${weightsName}.safetensors`
  const indexName = `${fileName}.index.json`
  if (entries.includes(indexName)) return { kind: 'index', fileName: indexName }
  if (entries.includes(fileName)) return { kind: 'file', fileName }

  refuseOtherFormats(directory, entries)
  throw new RankwiseError('CHECKPOINT_NOT_FOUND', 'the folder has no such weights', {
    where: directory,
    actual: { lookedFor: [indexName, fileName], found: listed(entries) },
    remedy: 'check the folder, the subfolder and that the download is complete',
  })
}

/** @throws RankwiseError `CHECKPOINT_FORMAT` when there are only weights of other formats */
export function refuseOtherFormats(directory: string, entries: readonly string[]): void {
  const others = entries.filter((entry) => OTHER_FORMATS.test(entry))
  if (others.length === 0 || entries.some((entry) => entry.endsWith('.safetensors'))) return
  throw otherFormat(directory, others)
}

/**
 * The path of a file of a checkpoint. An index comes from elsewhere: it may not name files outside the folder, and
 * links may not lead there, except into the `blobs` of the Hugging Face cache that the folder belongs to.
 *
 * @throws RankwiseError `CHECKPOINT_PATH`, `CHECKPOINT_FILE_MISSING`
 */
export async function resolveFile(directory: string, fileName: string): Promise<string> {
  const path = resolve(directory, fileName)
  // On every platform the name means the same, so what is a path on Windows only is refused everywhere.
  if (win32.isAbsolute(fileName) || /[\\\0]/.test(fileName) || !isWithin(resolve(directory), path)) {
    throw leavesFolder(directory, fileName, path)
  }
  const realDirectory = await realpath(directory)
  const realFile = await realPathOf(path, directory, fileName)
  if (!isWithin(realDirectory, realFile) && !isHubBlob(realDirectory, realFile)) {
    throw leavesFolder(directory, fileName, realFile)
  }
  return path
}

/** @throws RankwiseError `CHECKPOINT_FORMAT` when a file that an index names is of another format */
export function requireSafetensors(directory: string, fileNames: readonly string[]): void {
  const others = fileNames.filter((name) => !name.endsWith('.safetensors'))
  if (others.length > 0) throw otherFormat(directory, others)
}

async function listDirectory(directory: string): Promise<readonly string[]> {
  try {
    return (await readdir(directory)).sort()
  } catch (cause) {
    throw new RankwiseError('CHECKPOINT_NOT_FOUND', 'the folder cannot be read', {
      where: directory,
      actual: { problem: (cause as Error).message },
      cause,
    })
  }
}

async function realPathOf(path: string, directory: string, fileName: string): Promise<string> {
  try {
    return await realpath(path)
  } catch (cause) {
    throw new RankwiseError('CHECKPOINT_FILE_MISSING', `the checkpoint lacks its file ${quoteName(fileName)}`, {
      where: directory,
      actual: { problem: quoteName((cause as Error).message) },
      remedy: 'download the checkpoint again',
      cause,
    })
  }
}

function isWithin(directory: string, path: string): boolean {
  const way = relative(directory, path)
  return way !== '' && way !== '..' && !way.startsWith(`..${sep}`) && !isAbsolute(way)
}

/**
 * The Hugging Face cache stores a file once, as `<repository>/blobs/<hash>`, and links to it from
 * `<repository>/snapshots/<revision>/…`.
 */
function isHubBlob(realDirectory: string, realFile: string): boolean {
  const parts = realDirectory.split(sep)
  const snapshots = parts.lastIndexOf('snapshots')
  if (snapshots < 0 || snapshots === parts.length - 1) return false
  const blobs = [...parts.slice(0, snapshots), 'blobs'].join(sep)
  return dirname(realFile) === blobs && /^([0-9a-f]{40}|[0-9a-f]{64})$/.test(basename(realFile))
}

function leavesFolder(directory: string, fileName: string, target: string): RankwiseError {
  return new RankwiseError('CHECKPOINT_PATH', `the file ${quoteName(fileName)} lies outside the checkpoint`, {
    where: directory,
    actual: { target: quoteName(target) },
    rule: 'files of a checkpoint, and what they link to, lie in its folder or in the blobs of its Hugging Face cache',
  })
}

function otherFormat(directory: string, fileNames: readonly string[]): RankwiseError {
  return new RankwiseError('CHECKPOINT_FORMAT', 'the weights are not in safetensors format', {
    where: directory,
    actual: { found: listed(fileNames) },
    rule: 'Rankwise reads safetensors only',
    remedy: 'convert the checkpoint to safetensors',
  })
}

/** The first few names; a folder or an index may have thousands. */
function listed(names: readonly string[]): readonly string[] {
  const shown = names.slice(0, 10).map(quoteName)
  return names.length > shown.length ? [...shown, `and ${names.length - shown.length} more`] : shown
}

import { readdir, readFile, stat } from 'node:fs/promises'
import { basename, dirname, join } from 'node:path'
import { refuseForeignCheckpoint } from './checkpoint/foreign-checkpoint.ts'
import { RankwiseError } from './errors.ts'

/**
 * Reads a JSON file of a model folder.
 *
 * @throws RankwiseError `CONFIG_NOT_FOUND`, `CONFIG_UNREADABLE`, `CONFIG_INVALID`, `ADAPTERS_UNSUPPORTED`,
 *   `CHECKPOINT_FORMAT`
 */
export async function readConfig(directory: string, file = 'config.json'): Promise<unknown> {
  const path = join(directory, file)
  return parseConfig(await readConfigText(path), path)
}

/** @throws RankwiseError `CONFIG_INVALID` */
export function parseConfig(text: string, path: string): unknown {
  try {
    return JSON.parse(text)
  } catch (cause) {
    throw new RankwiseError('CONFIG_INVALID', `the file is not JSON: ${(cause as Error).message}`, {
      where: path,
      cause,
    })
  }
}

/** @throws RankwiseError `CONFIG_NOT_FOUND`, `CONFIG_UNREADABLE`, and as `refuseForeignCheckpoint` */
export async function readConfigText(path: string): Promise<string> {
  try {
    // Reading a FIFO would wait for a writer.
    if (!(await stat(path)).isFile()) throw new Error('not a regular file')
    return await readFile(path, 'utf8')
  } catch (cause) {
    const { code, message } = cause as NodeJS.ErrnoException
    if (code !== 'ENOENT' && code !== 'ENOTDIR') {
      throw new RankwiseError('CONFIG_UNREADABLE', `the file cannot be read: ${message}`, { where: path, cause })
    }
    refuseForeignCheckpoint(dirname(path), await entriesOf(dirname(path)))
    throw new RankwiseError('CONFIG_NOT_FOUND', 'there is no such file', {
      where: path,
      remedy: 'give the folder that diffusers wrote, and the subfolder of the model in it',
      cause,
    })
  }
}

/** Names of the files of a folder; the name of a file that is given for one. */
async function entriesOf(directory: string): Promise<readonly string[]> {
  try {
    return await readdir(directory)
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === 'ENOTDIR' ? [basename(directory)] : []
  }
}

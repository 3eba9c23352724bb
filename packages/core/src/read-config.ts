import { readFile, stat } from 'node:fs/promises'
import { join } from 'node:path'
import { RankwiseError } from './errors.ts'

/**
 * Reads a JSON file of a model folder.
 *
 * @throws RankwiseError `CONFIG_NOT_FOUND`, `CONFIG_UNREADABLE`, `CONFIG_INVALID`
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

/** @throws RankwiseError `CONFIG_NOT_FOUND`, `CONFIG_UNREADABLE` */
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
    throw new RankwiseError('CONFIG_NOT_FOUND', 'there is no such file', {
      where: path,
      remedy: 'give the folder that diffusers wrote, and the subfolder of the model in it',
      cause,
    })
  }
}

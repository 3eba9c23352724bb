import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { RankwiseError } from './errors.ts'

/** Reads `config.json` of a model folder. @throws RankwiseError `CONFIG_NOT_FOUND`, `CONFIG_INVALID` */
export async function readConfig(directory: string, file = 'config.json'): Promise<unknown> {
  const path = join(directory, file)
  let text: string
  try {
    text = await readFile(path, 'utf8')
  } catch (cause) {
    throw new RankwiseError('CONFIG_NOT_FOUND', `there is no ${file}`, {
      where: path,
      remedy: 'give the folder that diffusers wrote, and the subfolder of the model in it',
      cause,
    })
  }
  try {
    return JSON.parse(text)
  } catch (cause) {
    throw new RankwiseError('CONFIG_INVALID', `${file} is not JSON`, { where: path, cause })
  }
}

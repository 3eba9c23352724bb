import { randomUUID } from 'node:crypto'
import { constants } from 'node:fs'
import { access, lstat, rename, rm, stat, writeFile } from 'node:fs/promises'
import { basename, dirname, join, resolve } from 'node:path'
import { RankwiseError } from '@rankwise/core'

/** What a generation writes. */
interface OutputFiles {
  readonly out: string
  readonly trace: string | undefined
}

/**
 * Refuses outputs before minutes are spent on them.
 *
 * @throws RankwiseError `OUTPUT_FORMAT`, `OUTPUT_FILE`, `OUTPUT_FOLDER`, `OPTION_CONFLICT`
 */
export async function requireOutputs({ out, trace }: OutputFiles): Promise<void> {
  if (!out.toLowerCase().endsWith('.png')) {
    throw new RankwiseError('OUTPUT_FORMAT', 'pictures are written as PNG', { where: out, rule: '--out ends in .png' })
  }
  await requireWritable(out)
  if (trace === undefined) return
  await requireWritable(trace)
  if (resolve(trace) !== resolve(out)) return
  throw new RankwiseError('OPTION_CONFLICT', 'the trace would be written over the picture', {
    where: '--trace',
    actual: { out, trace },
    rule: '--out and --trace are different files',
  })
}

async function requireWritable(path: string): Promise<void> {
  const isFolder = await stat(resolve(path)).then(
    (found) => found.isDirectory(),
    () => path.endsWith('/'),
  )
  if (isFolder) {
    throw new RankwiseError('OUTPUT_FILE', 'this is a folder, and no file', { where: path === '' ? "''" : path })
  }
  const folder = dirname(resolve(path))
  await access(folder, constants.W_OK).catch((cause: unknown) => {
    throw new RankwiseError('OUTPUT_FOLDER', 'nothing can be written there', { where: folder, cause })
  })
}

/**
 * Writes a trace. A file appears complete or not at all; a pipe, a device or a link is written to as it is.
 *
 * @throws RankwiseError `TRACE_WRITE`; nothing is left behind
 */
export async function writeTrace(path: string, trace: object): Promise<void> {
  const text = JSON.stringify(trace)
  const temporary = join(dirname(path), `.${basename(path)}.${randomUUID()}.tmp`)
  try {
    if (await isOther(path)) return await writeFile(path, text)
    await writeFile(temporary, text, { flag: 'wx' })
    await rename(temporary, path)
  } catch (cause) {
    await rm(temporary, { force: true })
    throw new RankwiseError('TRACE_WRITE', 'the trace cannot be written', { where: path, cause })
  }
}

/** Whether something is there that is no plain file. */
async function isOther(path: string): Promise<boolean> {
  return lstat(path).then(
    (found) => !found.isFile(),
    () => false,
  )
}

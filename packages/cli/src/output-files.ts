import { randomUUID } from 'node:crypto'
import { constants } from 'node:fs'
import { access, lstat, readlink, rename, rm, stat, writeFile } from 'node:fs/promises'
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
  await requirePicture(out)
  if (trace === undefined) return
  await requireTrace(trace)
  if (resolve(trace) !== resolve(out)) return
  throw new RankwiseError('OPTION_CONFLICT', 'the trace would be written over the picture', {
    where: '--trace',
    actual: { out, trace },
    rule: '--out and --trace are different files',
  })
}

/** The picture appears beside its place and is moved there, whatever has been there. */
async function requirePicture(path: string): Promise<void> {
  await requireNoFolder(path)
  await requireFileBeside(path)
}

/** A trace does, too, but for what is no plain file. */
async function requireTrace(path: string): Promise<void> {
  await requireNoFolder(path)
  if (!(await isOther(path))) return requireFileBeside(path)
  try {
    await access(path, constants.W_OK)
  } catch (cause) {
    if (codeOf(cause) === 'ENOENT') return requireTrace(resolve(dirname(path), await readlink(path)))
    throw new RankwiseError('OUTPUT_FILE', 'it cannot be written', {
      where: path,
      actual: { reason: codeOf(cause) },
      cause,
    })
  }
}

async function requireNoFolder(path: string): Promise<void> {
  const isFolder = await stat(resolve(path)).then(
    (found) => found.isDirectory(),
    () => path.endsWith('/'),
  )
  if (!isFolder) return
  throw new RankwiseError('OUTPUT_FILE', 'this is a folder, and no file', { where: path === '' ? "''" : path })
}

/** Permissions do not tell all: a file system may be read-only, a name too long. */
async function requireFileBeside(path: string): Promise<void> {
  const temporary = temporaryBeside(resolve(path))
  try {
    await writeFile(temporary, '', { flag: 'wx' })
    await rm(temporary)
  } catch (cause) {
    throw new RankwiseError('OUTPUT_FOLDER', 'nothing can be written there', {
      where: dirname(temporary),
      actual: { file: basename(path), reason: codeOf(cause) },
      cause,
    })
  }
}

function temporaryBeside(path: string): string {
  return join(dirname(path), `.${basename(path)}.${randomUUID()}.tmp`)
}

/** What the system calls an error. */
function codeOf(error: unknown): string {
  return (error as NodeJS.ErrnoException).code ?? String(error)
}

/**
 * Writes a trace. A file appears complete or not at all; a pipe, a device or a link is written to as it is.
 *
 * @throws RankwiseError `TRACE_WRITE`; nothing is left behind
 */
export async function writeTrace(path: string, trace: object): Promise<void> {
  const text = JSON.stringify(trace)
  const temporary = temporaryBeside(path)
  try {
    if (await isOther(path)) return await writeFile(path, text)
    await writeFile(temporary, text, { flag: 'wx' })
    await rename(temporary, path)
  } catch (cause) {
    await rm(temporary, { force: true })
    throw new RankwiseError('TRACE_WRITE', 'the trace cannot be written', {
      where: path,
      actual: { reason: codeOf(cause) },
      cause,
    })
  }
}

/** Whether something is there that is no plain file. */
async function isOther(path: string): Promise<boolean> {
  return lstat(path).then(
    (found) => !found.isFile(),
    () => false,
  )
}

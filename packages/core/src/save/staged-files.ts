import { mkdir, readdir, rename, rm, rmdir, stat } from 'node:fs/promises'
import { dirname, join } from 'node:path'
import { RankwiseError } from '../errors.ts'
import { onDisk } from './disk-error.ts'
import { CONFIG_FILE, type WeightLayout, weightFilesAmong } from './weight-files.ts'

/**
 * Files that appear in a folder together or not at all. They are written to a hidden folder inside it and moved at the
 * end; files of an earlier save that they replace are moved away first, and back when something fails.
 */
export class StagedFiles {
  readonly directory: string
  /** Where files are written. */
  readonly stage: string
  /** Folders that were made for the save, outermost first. */
  readonly #made: string[] = []
  /** Whether the hidden folder holds files that could not be put back. */
  #holdsReplaced = false

  /**
   * @param directory Absolute.
   * @param id Part of the hidden folder's name; processes that save together use the same.
   */
  constructor(directory: string, id: string) {
    this.directory = directory
    this.stage = join(directory, `.rankwise-save-${id}`)
  }

  /** @throws RankwiseError `SAVE_FAILED` when the folder or the one inside it cannot be made */
  async prepare(): Promise<void> {
    await onDisk(this.directory, () => makeFolder(this.directory, this.#made))
    await onDisk(this.stage, () => mkdir(this.stage))
  }

  /** Where to write a file that will have this name. */
  path(fileName: string): string {
    return join(this.stage, fileName)
  }

  /**
   * Moves files into the folder. A process that is killed meanwhile leaves the folder without the file that readers
   * start from, not with a mixture: that file leaves first and comes last.
   *
   * @param replaced Names of files to take out, the one that readers start from first.
   * @param added Names of staged files, the one that readers start from last.
   * @throws RankwiseError `SAVE_FAILED` with everything as it was before, `SAVE_ROLLBACK` when that failed too
   */
  async commit(replaced: readonly string[], added: readonly string[]): Promise<void> {
    const away = join(this.stage, 'replaced')
    const moves = [
      ...replaced.map((name) => ({ from: join(this.directory, name), to: join(away, name) })),
      ...added.map((name) => ({ from: this.path(name), to: join(this.directory, name) })),
    ]
    await onDisk(away, () => mkdir(away))
    const done: Move[] = []
    try {
      for (const move of moves) {
        await onDisk(move.to, () => rename(move.from, move.to))
        done.unshift(move)
      }
    } catch (error) {
      await this.#undo(done, error)
      throw error
    }
    await this.#removeStage()
  }

  /** Removes what was staged, and folders that were made for it; the save has failed. */
  async discard(): Promise<void> {
    if (this.#holdsReplaced) return
    await this.#removeStage()
    // A folder that someone else uses by now is not empty, and stays.
    for (const folder of [...this.#made].reverse()) await rmdir(folder).catch(() => {})
  }

  async #undo(done: readonly Move[], failure: unknown): Promise<void> {
    try {
      for (const { from, to } of done) await rename(to, from)
    } catch (cause) {
      this.#holdsReplaced = true
      throw new RankwiseError('SAVE_ROLLBACK', 'the save failed, and so did putting the replaced files back', {
        where: this.stage,
        actual: { problem: (cause as Error).message },
        remedy: "move the files in its folder 'replaced' back by hand",
        cause: new AggregateError([failure, cause]),
      })
    }
  }

  async #removeStage(): Promise<void> {
    try {
      await rm(this.stage, { recursive: true, force: true, maxRetries: 3 })
    } catch (error) {
      // A file is where the folder was to be: nothing was ever staged.
      if ((error as NodeJS.ErrnoException).code === 'ENOTDIR') return
      process.emitWarning(`${this.stage} could not be removed: ${(error as Error).message}`, { code: 'SAVE_LEFTOVERS' })
    }
  }
}

/**
 * What is in the way of a save: an earlier one of the same layout, which it replaces, entry file first.
 *
 * @throws RankwiseError `SAVE_TARGET` when the folder is none, has folders where files are to go, or holds the weights in
 *   the other layout, so that a reader could not tell which are meant; `SAVE_FAILED`
 */
export async function replacedFiles(
  directory: string,
  weightsName: string,
  layout: WeightLayout,
): Promise<readonly string[]> {
  const entries = await entriesOf(directory)
  const other = weightFilesAmong(entries, weightsName, layout === 'whole' ? 'shards' : 'whole')
  if (other.length > 0) {
    throw new RankwiseError('SAVE_TARGET', 'the folder holds these weights in another layout', {
      where: directory,
      actual: { found: other },
      rule: 'a folder holds the weights of a model either whole or as shards of ranks',
      remedy: 'save to another folder',
    })
  }
  const own = [...weightFilesAmong(entries, weightsName, layout), ...entries.filter((name) => name === CONFIG_FILE)]
  for (const name of own) {
    const path = join(directory, name)
    // A link that leads nowhere is replaced like any other.
    const isDirectory = await stat(path).then(
      (status) => status.isDirectory(),
      () => false,
    )
    if (isDirectory) {
      throw occupied(path, 'a folder is where a file is to be saved', 'remove the folder, or save to another one')
    }
  }
  return own
}

interface Move {
  readonly from: string
  readonly to: string
}

/**
 * Makes a folder and those above it that are missing. The recursive `mkdir` of Node does not say which ones it made
 * when it fails halfway, and never returns where the file system refuses new folders with ENOENT, as /proc does.
 *
 * @param made Gets the folders that were made, outermost first.
 */
async function makeFolder(path: string, made: string[]): Promise<void> {
  try {
    await mkdir(path)
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException
    if (code === 'EEXIST') return
    if (code !== 'ENOENT' || dirname(path) === path) throw error
    await makeFolder(dirname(path), made)
    await mkdir(path)
  }
  made.push(path)
}

async function entriesOf(directory: string): Promise<readonly string[]> {
  try {
    return (await readdir(directory)).sort()
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException
    if (code === 'ENOENT') return []
    if (code === 'ENOTDIR') throw occupied(directory, 'a file is where the folder is to be', 'save to another folder')
    return onDisk(directory, () => Promise.reject(error))
  }
}

function occupied(where: string, what: string, remedy: string): RankwiseError {
  return new RankwiseError('SAVE_TARGET', what, { where, remedy })
}

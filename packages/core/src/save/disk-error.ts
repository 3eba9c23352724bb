import { RankwiseError } from '../errors.ts'

const REMEDIES: Readonly<Record<string, string>> = {
  ENOSPC: 'free disk space, or save to another disk',
  EDQUOT: 'free disk space, or save to another disk',
  EFBIG: 'save with a smaller maxShardSize, or to another disk',
  EACCES: 'save to a folder that this user may write to',
  EPERM: 'save to a folder that this user may write to',
  EROFS: 'save to a folder that this user may write to',
  ENOENT: 'save to a folder that stays in place, and that all ranks share',
}

/**
 * Does something to files of a save.
 *
 * @param path What it is done to, for the message.
 * @throws RankwiseError `SAVE_FAILED` with the reason of the operating system
 */
export async function onDisk<T>(path: string, action: () => Promise<T>): Promise<T> {
  try {
    return await action()
  } catch (cause) {
    const remedy = REMEDIES[(cause as NodeJS.ErrnoException).code ?? '']
    throw new RankwiseError('SAVE_FAILED', 'the file system refuses to save', {
      where: path,
      actual: { problem: (cause as Error).message },
      ...(remedy === undefined ? {} : { remedy }),
      cause,
    })
  }
}

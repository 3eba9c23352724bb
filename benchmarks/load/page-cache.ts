import { spawnSync } from 'node:child_process'
import { setTimeout as sleep } from 'node:timers/promises'

/** Whether the pages of a file are in memory before it is loaded. */
export type CacheState = 'warm' | 'cold'

const ATTEMPTS = 20
const RETRY_MS = 100
/** Share of the file that may be cached when it is cold: the kernel keeps some pages in per-CPU lists for a while. */
const COLD_SHARE = 0.01
const WARM_SHARE = 0.99

/**
 * Reads a file into the page cache, or drops its pages, and asks the kernel whether that is so. Pages that a process
 * still maps cannot be dropped: whoever loaded the file before must have ended.
 *
 * @throws Error when the cache is not as wanted after 2 s, with the share that is cached
 */
export async function setPageCache(file: string, state: CacheState): Promise<void> {
  const args = state === 'warm' ? readArgs(file) : [`if=${file}`, 'iflag=nocache', 'count=0']
  let share = Number.NaN
  for (let attempt = 0; attempt < ATTEMPTS; attempt++) {
    run('dd', args)
    share = cachedShare(file)
    if (state === 'warm' ? share >= WARM_SHARE : share <= COLD_SHARE) return
    await sleep(RETRY_MS)
  }
  const remedy = state === 'cold' ? '; a file in tmpfs cannot be dropped: name a --directory on a disk' : ''
  throw new Error(
    `the page cache of ${file} is not ${state}: it holds ${(100 * share).toFixed(1)} % of the file${remedy}`,
  )
}

/** Reads a whole file, so that what was missing from the page cache is there, and says how long that took. */
export function secondsToRead(file: string): number {
  const started = performance.now()
  run('dd', readArgs(file))
  return (performance.now() - started) / 1000
}

/** Share of a file, 0 to 1, that is in the page cache. */
export function cachedShare(file: string): number {
  const [resident, size] = run('fincore', ['--bytes', '--noheadings', '--raw', '--output', 'RES,SIZE', file])
    .trim()
    .split(' ')
    .map(Number) as [number, number]
  return resident / size
}

function readArgs(file: string): readonly string[] {
  return [`if=${file}`, 'of=/dev/null', 'bs=16M']
}

function run(command: 'dd' | 'fincore', args: readonly string[]): string {
  const { status, error, stdout, stderr } = spawnSync(command, args, { encoding: 'utf8' })
  if (error !== undefined)
    throw new Error(`${command} does not start; it comes with coreutils or util-linux`, { cause: error })
  if (status !== 0) throw new Error(`${command} ${args.join(' ')} failed: ${stderr}`)
  return stdout
}

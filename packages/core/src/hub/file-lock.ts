import { randomUUID } from 'node:crypto'
import { mkdir, open, readFile, readlink, rename, rm, stat, utimes, writeFile } from 'node:fs/promises'
import { hostname } from 'node:os'
import { dirname } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { throwIfAborted } from '../abort.ts'
import { temporaryName } from './hub-cache.ts'
import { cacheError } from './hub-error.ts'

/** How `FileLock.acquire` waits. */
export interface FileLockOptions {
  readonly signal?: AbortSignal | undefined
  /** How often a held lock is looked at, in milliseconds. @default 100 */
  readonly pollMs?: number
  /** A lock whose owner gives no sign of life for so long is taken over, in milliseconds. @default 60000 */
  readonly silentMs?: number
}

/** What a lock file says about its owner. */
interface Owner {
  readonly id: string
  readonly pid: number
  /** Process ids mean something within one boot of one machine, and within one namespace of it. */
  readonly machine: string
  /** When the process started, in ticks since the boot: ids are used again. */
  readonly started: string | undefined
}

interface Sighting {
  readonly text: string
  readonly modifiedMs: number
}

const HEARTBEATS_PER_SILENCE = 6

/** Time in which one of two processes that take over a lock at once sees that it was not the last. */
const TAKEOVER_MS = 50

/**
 * A lock that processes of any kind and machine share through a file. What is written under it must stay correct if two
 * hold it: one that sleeps through its silence loses it, and file systems of a network may show stale files.
 */
export class FileLock implements AsyncDisposable {
  /** Whether an owner that is alive may have been robbed: files of its own are not to be touched. */
  readonly isTakenFromSilence: boolean
  readonly #path: string
  readonly #text: string
  readonly #heartbeat: NodeJS.Timeout

  private constructor(path: string, text: string, isTakenFromSilence: boolean, silentMs: number) {
    this.isTakenFromSilence = isTakenFromSilence
    this.#path = path
    this.#text = text
    this.#heartbeat = setInterval(() => void this.#beat(), silentMs / HEARTBEATS_PER_SILENCE)
    this.#heartbeat.unref()
  }

  /**
   * Waits until the lock is free, or its owner has died or fallen silent.
   *
   * @throws RankwiseError `HUB_CACHE`, `HUB_DISK_FULL` when the lock file cannot be written, `ABORTED`
   */
  static async acquire(path: string, options: FileLockOptions = {}): Promise<FileLock> {
    const { signal, pollMs = 100, silentMs = 60_000 } = options
    const text = JSON.stringify(await describeSelf())
    const silence = new Silence(silentMs)
    try {
      await mkdir(dirname(path), { recursive: true })
      for (;;) {
        throwIfAborted(signal, path)
        const claim = await tryClaim(path, text, silence)
        if (claim !== 'held') return new FileLock(path, text, claim === 'silent', silentMs)
        await sleep(pollMs, undefined, signal === undefined ? {} : { signal })
      }
    } catch (error) {
      throwIfAborted(signal, path)
      throw cacheError(error, path, 'locked')
    }
  }

  /** Frees the lock, if it is still ours. Where that fails, its silence frees it. */
  async release(): Promise<void> {
    clearInterval(this.#heartbeat)
    if (await this.#isOurs()) await rm(this.#path, { force: true }).catch(() => undefined)
  }

  /** `release`, for `await using`. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.release()
  }

  async #beat(): Promise<void> {
    const now = new Date()
    if (await this.#isOurs()) await utimes(this.#path, now, now).catch(() => undefined)
  }

  async #isOurs(): Promise<boolean> {
    const sighting = await look(this.#path).catch(() => undefined)
    return sighting?.text === this.#text
  }
}

/** Notices that a lock file does not change any more. The watcher's own clock decides: those of machines differ. */
class Silence {
  readonly #silentMs: number
  #seen = ''
  #since = 0

  constructor(silentMs: number) {
    this.#silentMs = silentMs
  }

  isSilent({ text, modifiedMs }: Sighting): boolean {
    const seen = `${modifiedMs} ${text}`
    if (seen !== this.#seen) {
      this.#seen = seen
      this.#since = performance.now()
    }
    return performance.now() - this.#since > this.#silentMs
  }
}

/** Takes the lock when it is free, or its owner dead or silent. */
async function tryClaim(path: string, text: string, silence: Silence): Promise<'free' | 'dead' | 'silent' | 'held'> {
  if (await create(path, text)) return 'free'
  const sighting = await look(path)
  if (sighting === undefined) return 'held'
  const isDead = await isOwnerDead(sighting.text)
  if (!isDead && !silence.isSilent(sighting)) return 'held'
  if (!(await takeOver(path, sighting, text))) return 'held'
  return isDead ? 'dead' : 'silent'
}

async function create(path: string, text: string): Promise<boolean> {
  try {
    const handle = await open(path, 'wx')
    await handle.writeFile(text).finally(() => handle.close())
    return true
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'EEXIST') return false
    throw error
  }
}

/** Of several that replace the file, the last has it. */
async function takeOver(path: string, stale: Sighting, text: string): Promise<boolean> {
  const temporary = temporaryName(path)
  try {
    await writeFile(temporary, text)
    if ((await look(path))?.text !== stale.text) return false
    await rename(temporary, path)
  } finally {
    await rm(temporary, { force: true })
  }
  await sleep(TAKEOVER_MS)
  return (await look(path))?.text === text
}

async function look(path: string): Promise<Sighting | undefined> {
  try {
    const [text, { mtimeMs: modifiedMs }] = await Promise.all([readFile(path, 'utf8'), stat(path)])
    return { text, modifiedMs }
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return undefined
    throw error
  }
}

async function describeSelf(): Promise<Owner> {
  return { id: randomUUID(), pid: process.pid, machine: await machine(), started: await startOf(process.pid) }
}

/** Whether the owner ran here and does not any more. Of an owner elsewhere only its silence tells. */
async function isOwnerDead(text: string): Promise<boolean> {
  const owner = parseOwner(text)
  if (owner === undefined || owner.machine !== (await machine())) return false
  try {
    process.kill(owner.pid, 0)
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === 'ESRCH'
  }
  return owner.started !== (await startOf(owner.pid))
}

/** Undefined for a file that its owner is just writing, or died while writing. */
function parseOwner(text: string): Owner | undefined {
  try {
    const owner = JSON.parse(text) as Partial<Owner> | null
    return Number.isInteger(owner?.pid) && typeof owner?.machine === 'string' ? (owner as Owner) : undefined
  } catch {
    return undefined
  }
}

async function machine(): Promise<string> {
  const boot = await readFile('/proc/sys/kernel/random/boot_id', 'utf8').catch(() => '')
  const namespace = await readlink('/proc/self/ns/pid').catch(() => '')
  return [hostname(), boot.trim(), namespace].join(' ')
}

/** Field 22 of `/proc/<pid>/stat` (proc_pid_stat(5)), counted after the name, which may hold spaces and brackets. */
async function startOf(pid: number): Promise<string | undefined> {
  const line = await readFile(`/proc/${pid}/stat`, 'utf8').catch(() => '')
  return line.slice(line.lastIndexOf(')') + 2).split(' ')[19]
}

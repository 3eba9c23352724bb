import { readFileSync, readlinkSync } from 'node:fs'

/** What the kernel says about a running process. */
export interface ProcessState {
  /** One letter: `R` running, `S` sleeping, `T` stopped, ... */
  readonly state: string
  /** When the process started, in clock ticks since boot; tells it from a later process with the same pid. */
  readonly startTime: string
}

/** Fields of /proc/<pid>/stat, counted from the one behind the command name; see proc(5), where `state` is field 3. */
const STATE = 0
const START_TIME = 19

/** The state of a process; undefined once it has ended, even if its parent has not yet collected it. */
export function processState(pid: number): ProcessState | undefined {
  let stat: string
  try {
    stat = readFileSync(`/proc/${pid}/stat`, 'latin1')
  } catch (error) {
    if (isGone(error)) return undefined
    throw error
  }
  // The command name may itself contain spaces and parentheses.
  const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ')
  const state = fields[STATE] as string
  if (state === 'Z' || state === 'X') return undefined
  return { state, startTime: fields[START_TIME] as string }
}

/**
 * Whether the process that started at `startTime` still runs. Takes 15 us. It is taken for running when the kernel
 * does not answer, as when this process is out of file descriptors.
 */
export function isRunning(pid: number, startTime: string): boolean {
  try {
    return processState(pid)?.startTime === startTime
  } catch {
    return true
  }
}

/** Where the pid of this process is valid: the running system, and the pid namespace in it. */
export function pidNamespace(): string {
  const boot = readFileSync('/proc/sys/kernel/random/boot_id', 'latin1').trim()
  return `${boot} ${readlinkSync('/proc/self/ns/pid')}`
}

function isGone(error: unknown): boolean {
  const { code } = error as NodeJS.ErrnoException
  return code === 'ENOENT' || code === 'ESRCH'
}

import { isRunning, pidNamespace, processState } from '@rankwise/core'

/** A rank and the process it is. */
export interface Member {
  readonly rank: number
  readonly pid: number
  /** See `ProcessState`; empty where the system does not tell. */
  readonly startTime: string
  /** Where `pid` is valid; empty where the system does not tell. */
  readonly namespace: string
}

/** This process as a member. */
export function thisMember(rank: number): Member {
  return { rank, pid: process.pid, startTime: processState(process.pid)?.startTime ?? '', namespace: ownNamespace() }
}

/** Whether a process is known to have ended: only those of the own pid namespace can be looked at. */
export function isGone({ pid, startTime, namespace }: Member): boolean {
  return startTime !== '' && namespace === ownNamespace() && !isRunning(pid, startTime)
}

let namespace: string | undefined

function ownNamespace(): string {
  namespace ??= readNamespace()
  return namespace
}

/** Other systems than Linux have no /proc. */
function readNamespace(): string {
  try {
    return pidNamespace()
  } catch {
    return ''
  }
}

import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { RankwiseError } from '@rankwise/core'

/** Where control groups are mounted. */
const CGROUPS = '/sys/fs/cgroup'

/**
 * Refuses an allocation that cannot fit. Setting memory aside does not fail beyond the limit of a control group: the
 * kernel kills a process of the group instead. So the limits are read first; what other processes take a moment later
 * is not known.
 *
 * @throws RankwiseError `SHARED_MEMORY`
 */
export function requireAvailable(bytes: number): void {
  const available = availableMemory()
  if (bytes <= available) return
  throw new RankwiseError('SHARED_MEMORY', 'there is not enough memory for the ranks to share', {
    actual: { bytes, available },
    rule: 'shared memory fits into the memory of the machine and of the control group (container)',
    remedy: 'allow the container more memory, start fewer ranks, or choose smaller slotBytes',
  })
}

/** Bytes that this process can still take before the machine or a control group is out of memory. */
export function availableMemory(): number {
  const groups = (read('/proc/self/cgroup') ?? '').split('\n').map((line) => line.split(':'))
  const limits = groups.flatMap(([id, controllers = '', path = '']) => {
    if (id === '0') return ancestors(path).map((group) => version2(join(CGROUPS, group)))
    if (!controllers.split(',').includes('memory')) return []
    return ancestors(path).map((group) => version1(join(CGROUPS, 'memory', group)))
  })
  return Math.min(machine(), ...limits)
}

/** The group and those that it is in; inside a container, where only its own is mounted, the ones found count. */
function ancestors(path: string): string[] {
  const names = path.split('/').filter((name) => name !== '')
  return Array.from({ length: names.length + 1 }, (_, depth) => names.slice(0, depth).join('/'))
}

function machine(): number {
  const kilobytes = /^MemAvailable: +(\d+) kB$/m.exec(read('/proc/meminfo') ?? '')?.[1]
  return kilobytes === undefined ? Number.POSITIVE_INFINITY : Number(kilobytes) * 1024
}

function version2(folder: string): number {
  return remaining(read(join(folder, 'memory.max')), read(join(folder, 'memory.current')), folder, '')
}

function version1(folder: string): number {
  const limit = read(join(folder, 'memory.limit_in_bytes'))
  return remaining(limit, read(join(folder, 'memory.usage_in_bytes')), folder, 'total_')
}

/** Files in the page cache count as used, but give way. */
function remaining(limit: string | undefined, usage: string | undefined, folder: string, prefix: string): number {
  if (limit === undefined || usage === undefined || limit.trim() === 'max') return Number.POSITIVE_INFINITY
  const statistics = read(join(folder, 'memory.stat')) ?? ''
  const cached = ['active_file', 'inactive_file'].map((name) =>
    Number(new RegExp(`^${prefix}${name} (\\d+)$`, 'm').exec(statistics)?.[1] ?? 0),
  )
  return Number(limit) - Number(usage) + cached.reduce((sum, bytes) => sum + bytes, 0)
}

function read(path: string): string | undefined {
  try {
    return readFileSync(path, 'latin1')
  } catch {
    return undefined
  }
}

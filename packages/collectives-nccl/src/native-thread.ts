import { setTimeout } from 'node:timers/promises'
import { RankwiseError } from '@rankwise/core'

const POLL_MS = 1
/** `EBUSY` of Linux: the thread still runs. */
const BUSY = 16

interface Threads {
  create(thread: BigUint64Array, attributes: null, start: bigint, argument: bigint): number
  tryJoin(thread: bigint, result: BigInt64Array): number
}

let threads: Promise<Threads> | undefined

/**
 * Calls a C function of one argument that may block, on a thread of its own, and resolves with the `int` it returns. The
 * function is the start routine: on Linux (x64, arm64) an argument and a result of 32 bits travel in the same registers
 * as pointers. koffi's own asynchronous calls would not do: they have stacks of 128 KiB, which can no longer be changed
 * once another package has loaded koffi, and one that hangs takes a thread of Node's pool and keeps the process from
 * ending.
 *
 * @param limitMs how long to wait for it @default as long as it takes
 * @returns undefined when the function runs on beyond the limit
 * @throws RankwiseError `NCCL_THREAD` when the system has no thread for it
 */
export async function runOnThread(
  start: bigint,
  argument: bigint,
  limitMs = Number.POSITIVE_INFINITY,
): Promise<number | undefined> {
  threads ??= bindThreads()
  const { create, tryJoin } = await threads
  const thread = new BigUint64Array(1)
  const errno = create(thread, null, start, argument)
  if (errno !== 0) {
    throw new RankwiseError('NCCL_THREAD', 'pthread_create failed', {
      actual: { errno },
      remedy: 'raise the limit on processes and threads of this user (ulimit -u, cgroup pids.max)',
    })
  }
  const result = new BigInt64Array(1)
  const end = performance.now() + limitMs
  while (tryJoin(thread[0] as bigint, result) === BUSY) {
    if (performance.now() > end) return undefined
    await setTimeout(POLL_MS)
  }
  return Number(BigInt.asIntN(32, result[0] as bigint))
}

async function bindThreads(): Promise<Threads> {
  const { default: koffi } = await import('koffi')
  const libc = koffi.load(null)
  return {
    create: libc.func('pthread_create', 'int', ['void *', 'void *', 'void *', 'void *']),
    tryJoin: libc.func('pthread_tryjoin_np', 'int', ['uint64_t', 'void *']),
  }
}

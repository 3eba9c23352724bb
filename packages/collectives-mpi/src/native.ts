import { readFileSync } from 'node:fs'
import type { Socket } from 'node:net'
import { getSystemErrorName } from 'node:util'
import { RankwiseError } from '@rankwise/core'
import koffi from 'koffi'

const AF_UNIX = 1
const SOCK_STREAM = 1
const IPPROTO_TCP = 6
const TCP_USER_TIMEOUT = 18

/** Two connected sockets, as file descriptors that no child process inherits. @throws RankwiseError `MPI_FAILED` */
export function socketPair(): [number, number] {
  const SOCK_CLOEXEC = 0o2000000
  const pair = new Int32Array(2)
  const socketpair = koffi.load(null).func('int socketpair(int domain, int type, int protocol, void *pair)')
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) !== 0) {
    throw new RankwiseError('MPI_FAILED', 'no socket for PMI', {
      actual: { errno: getSystemErrorName(-koffi.errno()) },
      remedy: 'check the file descriptor limit of this process (ulimit -n)',
    })
  }
  return [pair[0] as number, pair[1] as number]
}

/**
 * Makes a connection end when what was sent on it stays unacknowledged for so long. The kernel of the other machine
 * acknowledges even while the process there is busy or stopped, so this finds lost machines and networks, and only them.
 *
 * @returns whether the system does so: Linux alone knows it
 */
export function endWhenUnacknowledged(socket: Socket, ms: number): boolean {
  const descriptor = descriptorOf(socket)
  if (process.platform !== 'linux' || descriptor === undefined) return false
  const setsockopt = koffi.load(null).func('int setsockopt(int fd, int level, int name, void *value, uint32_t length)')
  return setsockopt(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, Uint32Array.of(ms), 4) === 0
}

/** Node has no public way to the descriptor of a socket; this one has been there since Node 0.10. */
function descriptorOf(socket: Socket): number | undefined {
  const { _handle: handle } = socket as unknown as { _handle?: { fd?: unknown } }
  return typeof handle?.fd === 'number' && handle.fd >= 0 ? handle.fd : undefined
}

/**
 * Ends this process at its exit without waiting for other threads: Node joins its threads there, and one that MPI holds
 * in MPI_Init or MPI_Finalize because a rank is lost would never come back.
 */
export function exitWithoutThreads(): void {
  const end = koffi.load(null).func('void _exit(int status)')
  process.on('exit', (code) => end(code))
}

/**
 * Keeps every library that is loaded now until the end of the process. MPI_Finalize of OpenMPI 4 unloads its plug-ins,
 * but has left a hook in `free` and destructors of thread-local data in them: without this, Node crashes at its exit.
 */
export function keepLibraries(): void {
  if (process.platform !== 'linux') return
  const RTLD_LAZY = 1
  const RTLD_NOLOAD = 4
  const RTLD_NODELETE = 0x1000
  const dlopen = koffi.load(null).func('void *dlopen(const char *path, int flags)')
  const maps = readFileSync('/proc/self/maps', 'utf8')
  for (const path of new Set(maps.match(/\/\S+\.so(\.\d+)*$/gm))) dlopen(path, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE)
}

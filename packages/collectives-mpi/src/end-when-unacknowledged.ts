import type { Socket } from 'node:net'
import koffi from 'koffi'

const IPPROTO_TCP = 6
const TCP_USER_TIMEOUT = 18

/**
 * How long the network may take to acknowledge: long against a retransmission (200 ms at first) and short enough to
 * name the lost ranks within 2 s, together with the 250 ms between two messages.
 */
const UNACKNOWLEDGED_MS = 1_200

/**
 * Makes a connection end when what was sent on it stays unacknowledged for 1.2 s. The kernel of the other machine
 * acknowledges even while the process there is busy or stopped, so this finds lost machines and networks, and only them.
 *
 * @returns whether the system does so: Linux alone knows it
 */
export function endWhenUnacknowledged(socket: Socket): boolean {
  const descriptor = descriptorOf(socket)
  if (process.platform !== 'linux' || descriptor === undefined) return false
  const setsockopt = koffi.load(null).func('int setsockopt(int fd, int level, int name, void *value, uint32_t length)')
  return setsockopt(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, Uint32Array.of(UNACKNOWLEDGED_MS), 4) === 0
}

/** Node has no public way to the descriptor of a socket; this one has been there since Node 0.10. */
function descriptorOf(socket: Socket): number | undefined {
  const { _handle: handle } = socket as unknown as { _handle?: { fd?: unknown } }
  return typeof handle?.fd === 'number' && handle.fd >= 0 ? handle.fd : undefined
}

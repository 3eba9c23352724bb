import type { Socket } from 'node:net'

/** How long the other side may take to end a connection. */
const CLOSE_MS = 1_000

/**
 * Ends a connection after what is still to be sent, and reads on until the other side ends as well: closing with bytes
 * unread would reset the connection, and take from the other side what it was sent last. Keeps the process alive
 * meanwhile, for 1 s at most.
 */
export function endSocket(socket: Socket): Promise<void> {
  return new Promise((resolve) => {
    if (socket.closed) return resolve()
    const timer = setTimeout(() => socket.destroy(), CLOSE_MS)
    socket.once('close', () => {
      clearTimeout(timer)
      resolve()
    })
    socket.end()
    socket.resume()
  })
}

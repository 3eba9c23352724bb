import type { Socket } from 'node:net'
import { RankwiseError } from '@rankwise/core'

/** The connection ended, or said something that is no message; whoever reads it decides what that means. */
export class ConnectionError extends Error {
  override readonly name = 'ConnectionError'
}

/** An error that one rank sends to another instead of the next message. */
interface ErrorMessage {
  readonly error: { readonly code: string; readonly what: string }
}

/** Sends a message: one line of JSON. */
export function send(socket: Socket, message: unknown): void {
  if (socket.writable) socket.write(`${JSON.stringify(message)}\n`)
}

/**
 * The next message. Ranks speak in turns, so nothing may follow it yet.
 *
 * @param limit longest accepted line, in bytes: a stranger cannot make this process buffer more
 * @throws ConnectionError when the connection ends first or the line is too long or not JSON
 * @throws what `signal` was aborted with
 */
export function receive(socket: Socket, limit: number, signal: AbortSignal): Promise<unknown> {
  return new Promise((resolve, reject) => {
    const chunks: Buffer[] = []
    let length = 0
    const settle = (finish: () => void) => {
      socket.off('data', onData).off('error', onEnd).off('close', onEnd)
      signal.removeEventListener('abort', onAbort)
      finish()
    }
    const fail = (why: string) => settle(() => reject(new ConnectionError(why)))
    const onEnd = (error?: Error | boolean) =>
      fail(error instanceof Error ? error.message : 'the connection was closed')
    const onAbort = () => settle(() => reject(signal.reason))
    const onData = (chunk: Buffer) => {
      length += chunk.length
      if (length > limit) return fail('the message is too long')
      chunks.push(chunk)
      const end = chunk.indexOf('\n')
      if (end < 0) return
      if (end !== chunk.length - 1) return fail('more than one message came')
      const message = parse(Buffer.concat(chunks).toString())
      if (message === undefined) fail('the message is not JSON')
      else settle(() => resolve(message))
    }
    if (signal.aborted) return reject(signal.reason)
    if (socket.destroyed) return reject(new ConnectionError('the connection was closed'))
    socket.on('data', onData).on('error', onEnd).on('close', onEnd)
    signal.addEventListener('abort', onAbort)
  })
}

function parse(text: string): unknown {
  try {
    return JSON.parse(text)
  } catch {
    return undefined
  }
}

/** The fields of a message; none if it is not an object. */
export function fieldsOf(message: unknown): Readonly<Record<string, unknown>> {
  return typeof message === 'object' && message !== null ? (message as Record<string, unknown>) : {}
}

export function errorMessage(error: unknown): ErrorMessage {
  if (error instanceof RankwiseError) {
    const [first = ''] = error.message.split('\n')
    return { error: { code: error.code, what: first.replace(`[${error.code}] `, '') } }
  }
  return { error: { code: 'RENDEZVOUS_FAILED', what: error instanceof Error ? error.message : String(error) } }
}

/** @throws RankwiseError with the code that another rank sent. */
export function rethrowErrorMessage(message: unknown, where: string): void {
  const { code, what } = fieldsOf(fieldsOf(message).error)
  if (typeof code === 'string' && typeof what === 'string') throw new RankwiseError(code, what, { where })
}

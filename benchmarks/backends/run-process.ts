import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { basename } from 'node:path'
import type { Readable } from 'node:stream'
import { text } from 'node:stream/consumers'
import type { RankCommand } from '../rank-command.ts'

/**
 * Runs a process to its end, and `beside` meanwhile. Descriptor 3 is a pipe to the process that measures.
 *
 * @returns what `beside` does
 * @throws Error with what the process printed if it fails; the reason of `signal`, once the process has ended
 */
export async function runProcess<T>(
  { file, args, env }: RankCommand,
  signal: AbortSignal,
  beside: (process: ChildProcess) => Promise<T>,
): Promise<T> {
  signal.throwIfAborted()
  const child = spawn(file, args, { env: { ...process.env, ...env }, stdio: ['pipe', 'pipe', 'pipe', 'pipe'] })
  const closed = once(child, 'close')
  const stop = () => child.kill('SIGKILL')
  signal.addEventListener('abort', stop)
  try {
    const printed = Promise.all([text(child.stdout as Readable), text(child.stderr as Readable)])
    const [result, [code, cause]] = await Promise.all([beside(child), closed])
    signal.throwIfAborted()
    if (code === 0) return result
    throw new Error(`${basename(file)} ended with ${code ?? cause}\n${(await printed).join('')}`)
  } finally {
    signal.removeEventListener('abort', stop)
    stop()
    await closed.catch(() => undefined)
  }
}

import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { basename } from 'node:path'
import { text } from 'node:stream/consumers'
import type { RankCommand } from '../rank-command.ts'

/** How a process ended. */
interface Outcome {
  readonly stdout: string
  readonly failure: string | undefined
}

const LIMIT_MS = 600_000
const KILL_MS = 5_000

/**
 * Runs one process per command to the end. When one fails, the others are stopped; none is left when it returns.
 *
 * @returns what the first one printed
 * @throws Error with what became of every process
 */
export async function runRanks(commands: readonly RankCommand[], signal: AbortSignal): Promise<string> {
  const failed = new AbortController()
  const limit = AbortSignal.timeout(LIMIT_MS)
  const stop = AbortSignal.any([signal, failed.signal, limit])
  const outcomes = await Promise.all(
    commands.map(async (command) => {
      const outcome = await run(command, stop)
      if (outcome.failure !== undefined) failed.abort()
      return outcome
    }),
  )
  signal.throwIfAborted()
  const failures = outcomes.flatMap(({ failure }, index) => (failure === undefined ? [] : [`${index}: ${failure}`]))
  if (limit.aborted) failures.unshift(`not done in ${LIMIT_MS / 1000} s`)
  if (failures.length > 0) throw new Error(failures.join('\n'))
  return (outcomes[0] as Outcome).stdout
}

async function run({ file, args, env }: RankCommand, stop: AbortSignal): Promise<Outcome> {
  const child = spawn(file, args, { env: { ...process.env, ...env }, stdio: ['ignore', 'pipe', 'pipe'] })
  let kill: NodeJS.Timeout | undefined
  const onStop = () => {
    // mpirun ends its ranks at SIGTERM; at SIGKILL it could not.
    child.kill('SIGTERM')
    kill = setTimeout(() => child.kill('SIGKILL'), KILL_MS)
  }
  stop.addEventListener('abort', onStop)
  try {
    const output = Promise.all([text(child.stdout), text(child.stderr)])
    if (stop.aborted) onStop()
    const [code, cause] = await once(child, 'close')
    const [stdout, stderr] = await output
    if (code === 0) return { stdout, failure: undefined }
    return { stdout, failure: `${basename(file)} ended with ${code ?? cause}\n${stdout}${stderr}` }
  } catch (error) {
    return { stdout: '', failure: String(error) }
  } finally {
    clearTimeout(kill)
    stop.removeEventListener('abort', onStop)
  }
}

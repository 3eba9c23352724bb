import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { setTimeout } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'

const MAIN = fileURLToPath(new URL('../src/main.ts', import.meta.url))

export interface CommandResult {
  readonly code: number | null
  readonly stdout: string
  readonly stderr: string
}

export interface RunningCommand {
  readonly child: ChildProcess
  readonly result: Promise<CommandResult>
  /** Resolves once the command has written something like this. */
  stderrMatching(pattern: RegExp): Promise<void>
}

/** Starts the `rankwise` command from its sources, as a process of its own. */
export function startRankwise(...args: readonly string[]): RunningCommand {
  const child = spawn(process.execPath, ['--import', 'tsx', '--conditions=@rankwise/source', MAIN, ...args], {
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  const text = { stdout: '', stderr: '' }
  for (const name of ['stdout', 'stderr'] as const) {
    child[name].setEncoding('utf8').on('data', (chunk: string) => {
      text[name] += chunk
    })
  }
  return {
    child,
    result: once(child, 'close').then(([code]) => ({ code: code as number | null, ...text })),
    async stderrMatching(pattern) {
      while (!pattern.test(text.stderr)) await setTimeout(20)
    },
  }
}

/** Runs the command to its end. */
export function rankwise(...args: readonly string[]): Promise<CommandResult> {
  return startRankwise(...args).result
}

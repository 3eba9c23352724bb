import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { fileURLToPath } from 'node:url'

const MAIN = fileURLToPath(new URL('../src/main.ts', import.meta.url))

export interface CommandResult {
  readonly code: number | null
  readonly stdout: string
  readonly stderr: string
}

/** Runs the `rankwise` command from its sources, as a process of its own. */
export async function rankwise(...args: readonly string[]): Promise<CommandResult> {
  const child = spawn(process.execPath, ['--import', 'tsx', '--conditions=@rankwise/source', MAIN, ...args], {
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  const text = { stdout: '', stderr: '' }
  for (const name of ['stdout', 'stderr'] as const) {
    child[name].setEncoding('utf8').on('data', (chunk: string) => {
      text[name] += chunk
    })
  }
  const [code] = (await once(child, 'close')) as [number | null]
  return { code, ...text }
}

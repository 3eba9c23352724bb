import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { fileURLToPath } from 'node:url'
import { describe, expect, test } from 'vitest'

const PACKAGE = fileURLToPath(new URL('..', import.meta.url))
const COMMAND = fileURLToPath(new URL('scripts/rankwise-run.ts', import.meta.url))
const ALL_REDUCE = fileURLToPath(new URL('scripts/all-reduce.ts', import.meta.url))
const RANK = fileURLToPath(new URL('scripts/rank.mjs', import.meta.url))
const NODE_OPTIONS = ['--import', 'tsx', '--conditions=@rankwise/source']

interface Outcome {
  readonly code: number | null
  readonly stdout: string[]
  readonly stderr: string
}

/** Runs the command as a user does, in a process of its own. */
function rankwise(...args: string[]) {
  const child = spawn(process.execPath, [...NODE_OPTIONS, COMMAND, 'run', ...args], {
    cwd: PACKAGE,
  })
  const outcome = collect(child)
  return { child, outcome }
}

async function collect(child: ReturnType<typeof spawn>): Promise<Outcome> {
  const text = { stdout: '', stderr: '' }
  for (const name of ['stdout', 'stderr'] as const) {
    child[name]?.setEncoding('utf8').on('data', (chunk: string) => {
      text[name] += chunk
    })
  }
  const [code] = (await once(child, 'close')) as [number | null]
  return { code, stdout: text.stdout.split('\n').slice(0, -1).sort(), stderr: text.stderr }
}

describe('rankwise run', () => {
  test('a TypeScript script adds over two ranks, with its own arguments', async () => {
    const args = ['--nproc-per-node', '2', ALL_REDUCE, '--nproc-per-node', '-x']
    const { code, stdout, stderr } = await rankwise(...args).outcome
    expect({ code, stderr }).toEqual({ code: 0, stderr: '' })
    expect(stdout).toEqual(['[0] --nproc-per-node -x 3 20', '[1] --nproc-per-node -x 3 20'])
  })

  test('one rank dies: the other names it, and the exit code is that of the first failure', async () => {
    const { code, stderr } = await rankwise('--nproc-per-node', '2', ALL_REDUCE, 'die').outcome
    expect(code).toBe(137)
    expect(stderr).toMatch('rankwise: rank 1 was ended by SIGKILL')
    expect(stderr).toMatch(/^\[0\] .*\[RANK_LOST\] barrier #2: the process of rank 1 has ended/m)
  })

  test('JavaScript needs no loader, and output can go without prefix', async () => {
    const { code, stdout } = await rankwise('--no-prefix', '--timeout', '77', RANK, '*:env:RANKWISE_TIMEOUT_MS').outcome
    expect({ code, stdout }).toEqual({ code: 0, stdout: ['77'] })
  })

  test('rank 0 can be left without prefix, and reads the input', async () => {
    const { child, outcome } = rankwise('--nproc-per-node', '2', '--inherit-rank0', RANK, '*:stdin', '*:print:done')
    child.stdin.end('hello\n')
    expect((await outcome).stdout).toEqual(['[1] done', 'done', 'read hello'])
  })

  test.each<[NodeJS.Signals, number]>([
    ['SIGINT', 130],
    ['SIGTERM', 143],
  ])('%s is passed on to the ranks', async (signal, code) => {
    const { child, outcome } = rankwise('--nproc-per-node', '2', RANK, '*:print:ready', '*:sleep:60000')
    let ready = ''
    for await (const chunk of child.stdout) {
      ready += chunk
      if (ready.includes('[0] ready') && ready.includes('[1] ready')) break
    }
    child.kill(signal)
    expect(await outcome).toMatchObject({ code, stderr: '' })
  })

  test('a script that does not exist is named before anything starts', async () => {
    const { code, stderr } = await rankwise('no-such-script.ts').outcome
    expect(code).toBe(1)
    expect(stderr).toMatch(/^\[SCRIPT_NOT_FOUND\] .*no-such-script\.ts: there is no such script/)
  })

  test('a number of ranks that is none is refused', async () => {
    const { code, stderr } = await rankwise('--nproc-per-node', '0', RANK).outcome
    expect(code).toBe(1)
    expect(stderr).toMatch("argument '0' is invalid")
  })
})

import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { fileURLToPath } from 'node:url'
import { describe, expect, test } from 'vitest'
import { freePort, isGone } from './support.ts'

const PACKAGE = fileURLToPath(new URL('..', import.meta.url))
const COMMAND = fileURLToPath(new URL('scripts/rankwise-run.ts', import.meta.url))
const ALL_REDUCE = fileURLToPath(new URL('scripts/all-reduce.ts', import.meta.url))
const RANK = fileURLToPath(new URL('scripts/rank.mjs', import.meta.url))
const STORE = fileURLToPath(new URL('scripts/store.ts', import.meta.url))
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

  test('ranks of a launcher that was killed are ended, even one that is busy and one that wants to go on', async () => {
    const actions = ['*:pid', '0:ignore:SIGTERM', '1:spin:60000', '*:sleep:60000']
    const { child } = rankwise('--nproc-per-node', '2', RANK, ...actions)
    let output = ''
    for await (const chunk of child.stdout) {
      output += chunk
      if (/\[0\] pid/.test(output) && /\[1\] pid/.test(output)) break
    }
    child.kill('SIGKILL')
    const pids = [...output.matchAll(/pid (\d+)/g)].map(([, pid]) => pid as string)
    expect(pids).toHaveLength(2)
    await expect.poll(() => pids.filter((pid) => !isGone(pid)), { timeout: 15_000 }).toEqual([])
  })

  test('a rank that fails is started again with the others, in a new group', async () => {
    const args = ['--nproc-per-node', '2', '--max-restarts', '1', ALL_REDUCE, 'die-once']
    const { code, stdout, stderr } = await rankwise(...args).outcome
    expect(code).toBe(0)
    expect(stdout.filter((line) => line.includes('die-once 3 20'))).toHaveLength(4)
    expect(stderr).toMatch('rankwise: starting all ranks again (restart 1 of 1)')
  })

  test('two launchers are two machines', async () => {
    const port = String(await freePort())
    const machine = (nodeRank: string) =>
      rankwise(
        ...['--nproc-per-node', '2', '--nnodes', '2', '--node-rank', nodeRank],
        ...['--master-addr', '127.0.0.1', '--master-port', port, STORE],
      ).outcome
    process.env.RANKWISE_TOKEN = 'of both'
    const outcomes = await Promise.all([machine('0'), machine('1')])
    delete process.env.RANKWISE_TOKEN
    expect(outcomes.map(({ code, stderr }) => ({ code, stderr }))).toEqual([
      { code: 0, stderr: '' },
      { code: 0, stderr: '' },
    ])
    expect(outcomes[0]?.stdout).toEqual(['[0] rank 0 of 4: 0,1,2,3', '[1] rank 1 of 4: 0,1,2,3'])
    expect(outcomes[1]?.stdout).toEqual(['[2] rank 2 of 4: 0,1,2,3', '[3] rank 3 of 4: 0,1,2,3'])
  })

  test('several machines need a token that they share', async () => {
    const args = ['--nnodes', '2', '--master-addr', '127.0.0.1', '--master-port', '29500', STORE]
    const { code, stderr } = await rankwise(...args).outcome
    expect(code).toBe(1)
    expect(stderr).toMatch(/^\[LAUNCH_OPTIONS\] environment variable RANKWISE_TOKEN: the machines share no token/)
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

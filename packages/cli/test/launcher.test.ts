import { Writable } from 'node:stream'
import { setTimeout } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { describe, expect, test } from 'vitest'
import { type LaunchOptions, launch } from '../src/launcher.ts'
import { isGone } from './support.ts'

const SCRIPT = fileURLToPath(new URL('scripts/rank.mjs', import.meta.url))

class Output extends Writable {
  text = ''
  override _write(chunk: Buffer, _encoding: string, done: () => void): void {
    this.text += chunk
    done()
  }

  get lines(): string[] {
    return this.text.split('\n').slice(0, -1).sort()
  }

  /** Waits until a rank has written something. */
  async find(pattern: RegExp): Promise<string> {
    for (;;) {
      const match = pattern.exec(this.text)
      if (match !== null) return match[1] ?? match[0]
      await setTimeout(10)
    }
  }
}

function start(actions: readonly string[], options: Partial<LaunchOptions> = {}) {
  const [stdout, stderr] = [new Output(), new Output()]
  const command = [process.execPath, SCRIPT, ...actions]
  const exit = launch({ command, nprocPerNode: 2, prefix: true, stdout, stderr, ...options })
  return { exit, stdout, stderr }
}

describe('environment', () => {
  test('every rank finds its place and the same address and secret', async () => {
    const { exit, stdout } = start(
      ['*:env:RANK,LOCAL_RANK,WORLD_SIZE,LOCAL_WORLD_SIZE,MASTER_ADDR,RANKWISE_TIMEOUT_MS'],
      {
        timeoutMs: 1234,
      },
    )
    expect(await exit).toBe(0)
    expect(stdout.lines).toEqual(['[0] 0,0,2,2,127.0.0.1,1234', '[1] 1,1,2,2,127.0.0.1,1234'])

    const shared = start(['*:env:MASTER_PORT,RANKWISE_TOKEN'], { env: { RANK: '7', RANKWISE_TOKEN: 'old' } })
    await shared.exit
    const [first = '', second = ''] = shared.stdout.lines.map((line) => line.slice(4))
    expect(first).toMatch(/^\d+,[0-9a-f]{64}$/)
    expect(second).toBe(first)
  })

  test('two launches have different secrets', async () => {
    const [a, b] = [start(['*:env:RANKWISE_TOKEN']), start(['*:env:RANKWISE_TOKEN'])]
    await Promise.all([a.exit, b.exit])
    expect(a.stdout.lines[0]).not.toEqual(b.stdout.lines[0])
  })
})

describe('several machines', () => {
  test('ranks are numbered over all, and have the address and the token that were given', async () => {
    const actions = ['*:env:RANK,LOCAL_RANK,WORLD_SIZE,LOCAL_WORLD_SIZE,MASTER_ADDR,MASTER_PORT,RANKWISE_TOKEN']
    const env = { ...process.env, RANKWISE_TOKEN: 'shared' }
    const given = { nnodes: 3, nodeRank: 1, masterAddr: 'node-0', masterPort: 29500, env }
    const { exit, stdout } = start(actions, given)
    expect(await exit).toBe(0)
    expect(stdout.lines).toEqual(['[2] 2,0,6,2,node-0,29500,shared', '[3] 3,1,6,2,node-0,29500,shared'])
  })
})

describe('another launcher that has started this one', () => {
  test('does not tell its ranks anything', async () => {
    const outer = { OMPI_COMM_WORLD_RANK: '7', TORCHELASTIC_RUN_ID: 'run', TORCHELASTIC_USE_AGENT_STORE: 'True' }
    const { exit, stdout } = start([`*:env:${Object.keys(outer)}`], { env: { ...process.env, ...outer } })
    await exit
    // How `env` of the script prints variables that are not set.
    const none = ',,'
    expect(stdout.lines).toEqual([`[0] ${none}`, `[1] ${none}`])
  })
})

describe('restarts', () => {
  test('all ranks are stopped and started again, with another token and another count', async () => {
    const actions = [
      '*:env:TORCHELASTIC_RESTART_COUNT,TORCHELASTIC_MAX_RESTARTS,RANKWISE_TOKEN',
      '1:failBefore:2',
      '0:sleep:600',
    ]
    const { exit, stdout, stderr } = start(actions, { maxRestarts: 3 })
    expect(await exit).toBe(0)
    const [counts, tokens] = [1, 2].map((i) => stdout.lines.map((line) => line.split(/[ ,]/)[i === 1 ? 1 : 3]))
    expect(counts).toEqual(['0', '1', '2', '0', '1', '2'])
    expect(new Set(tokens).size).toBe(3)
    expect(stderr.text).toBe(
      [1, 2]
        .map(
          (restart) =>
            'rankwise: rank 1 failed with exit code 9; stopping the others\n' +
            `rankwise: starting all ranks again (restart ${restart} of 3)\n`,
        )
        .join(''),
    )
  })

  test('the last failure is that of the launch', async () => {
    const { exit, stdout } = start(['*:print:start', '1:failBefore:9'], { maxRestarts: 1 })
    expect(await exit).toBe(9)
    expect(stdout.lines).toHaveLength(4)
  })

  test('not after an abort', async () => {
    const controller = new AbortController()
    const options = { maxRestarts: 5, signal: controller.signal }
    const { exit, stdout } = start(['*:print:start', '*:sleep:60000'], options)
    await stdout.find(/\[0\] start/)
    controller.abort()
    await expect(exit).rejects.toMatchObject({ code: 'ABORTED' })
    expect(stdout.lines.length).toBeLessThanOrEqual(2)
  })
})

describe('exit code', () => {
  test.each<[string, string[], number]>([
    ['all ranks succeed', [], 0],
    ['a rank fails', ['1:exit:3'], 3],
    ['rank 0 fails', ['0:exit:4'], 4],
    ['a rank is killed', ['1:signal:SIGKILL'], 137],
    ['another rank fails later', ['0:sleep:200', '0:exit:5', '1:exit:6'], 6],
    ['the other rank is ended because of it', ['0:exit:7', '1:sleep:60000'], 7],
  ])('%s', async (_, actions, code) => {
    expect(await start(actions).exit).toBe(code)
  })

  test('the failed rank is named', async () => {
    const { exit, stderr } = start(['1:signal:SIGKILL', '0:sleep:60000'])
    await exit
    expect(stderr.text).toBe('rankwise: rank 1 was ended by SIGKILL; stopping the others\n')
  })
})

describe('no rank outlives the launch', () => {
  test('peers of a failed rank may still report, then they are ended', async () => {
    const { exit, stdout } = start(['1:exit:1', '0:pid', '0:sleep:100', '0:print:report', '0:sleep:60000'])
    expect(await exit).toBe(1)
    expect(stdout.text).toMatch('[0] report')
    expect(isGone(await stdout.find(/pid (\d+)/))).toBe(true)
  })

  test('one that ignores SIGTERM is killed after the grace period', async () => {
    const actions = ['0:ignore:SIGTERM', '0:pid', '1:sleep:300', '1:exit:1', '0:sleep:60000']
    const { exit, stdout } = start(actions, { graceMs: 200 })
    expect(await exit).toBe(1)
    expect(stdout.text).toMatch('[0] ignored SIGTERM')
    expect(isGone(await stdout.find(/pid (\d+)/))).toBe(true)
  })

  test('what a rank has started ends with it', async () => {
    const { exit, stdout } = start(['0:child'])
    expect(await exit).toBe(0)
    const child = await stdout.find(/child (\d+)/)
    await expect.poll(() => isGone(child)).toBe(true)
  })

  test('abort ends all ranks', async () => {
    const controller = new AbortController()
    const { exit, stdout } = start(['*:pid', '*:sleep:60000'], { signal: controller.signal })
    const pids = [await stdout.find(/\[0\] pid (\d+)/), await stdout.find(/\[1\] pid (\d+)/)]
    const cause = new Error('enough')
    controller.abort(cause)
    await expect(exit).rejects.toMatchObject({ code: 'ABORTED', cause })
    expect(pids.every(isGone)).toBe(true)
  })

  test('a command that does not exist is named', async () => {
    const exit = launch({ command: ['./no-such-program'], nprocPerNode: 2 })
    await expect(exit).rejects.toMatchObject({ code: 'LAUNCH_FAILED', where: './no-such-program' })
  })

  test('output that nobody reads any more ends all ranks', async () => {
    const stdout = new Output()
    stdout._write = (_chunk: Buffer, _encoding: string, done: (error?: Error) => void) => done(new Error('EPIPE'))
    await expect(start(['*:print:x', '*:sleep:60000'], { stdout }).exit).rejects.toThrow('EPIPE')
  })

  test.each<Partial<LaunchOptions>>([
    { nprocPerNode: 0 },
    { nprocPerNode: 1.5 },
    { command: [] },
    { timeoutMs: 0 },
    { graceMs: -1 },
    { nnodes: 0 },
    { nodeRank: 1 },
    { nodeRank: -1 },
    { masterPort: 65_536 },
    { masterAddr: 'two words' },
    { masterAddr: '192.0.2.1' },
    { maxRestarts: -1 },
    { nnodes: 2, env: { RANKWISE_TOKEN: 'shared' } },
    { nnodes: 2, masterAddr: '127.0.0.1', env: { RANKWISE_TOKEN: 'shared' } },
    { nnodes: 2, masterAddr: '127.0.0.1', masterPort: 29500, env: {} },
    { nnodes: 2, masterAddr: '127.0.0.1', masterPort: 29500, env: { RANKWISE_TOKEN: '' } },
  ])('nothing is started for %o', async (options) => {
    await expect(start([], options).exit).rejects.toMatchObject({ code: 'LAUNCH_OPTIONS' })
  })
})

test('each line begins with its rank', async () => {
  const actions = ['0:write:ab', '0:sleep:50', '0:print:cd', '0:write:no newline', '1:error:oops']
  const { exit, stdout, stderr } = start(actions)
  await exit
  expect(stdout.text).toBe('[0] abcd\n[0] no newline\n')
  expect(stderr.text).toBe('[1] oops\n')
})

import { type ChildProcess, fork, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { createServer } from 'node:net'
import { fileURLToPath } from 'node:url'
import type { DType, EnvironmentRendezvous, ReduceOp } from '@rankwise/core'

export interface TensorBytes {
  readonly dtype: DType
  readonly shape: readonly number[]
  readonly bytes: Uint8Array
}

export interface Call {
  readonly kind: 'allReduce' | 'allGather' | 'reduceScatter' | 'broadcast' | 'barrier'
  readonly tensors: readonly TensorBytes[]
  readonly op?: ReduceOp
  readonly source?: number
}

export type Command =
  | { do: 'init'; rendezvous: EnvironmentRendezvous; options: InitOptions }
  | { do: 'run'; call: Call }
  | { do: 'abort'; message: string }
  | { do: 'setLibrary'; path: string | undefined }
  | { do: 'abortSignal' | 'held' | 'destroy' | 'finish' }

export interface InitOptions {
  readonly chunkBytes?: number
  /** Says of each rank on which machine it is, instead of what it says itself. */
  readonly machines?: readonly string[]
}

export interface Report {
  readonly code: string
  readonly message: string
  readonly where?: string | undefined
  readonly actual?: Readonly<Record<string, unknown>>
}

export interface Reply {
  readonly id: number
  readonly value?: unknown
  readonly error?: Report
  /** Time from the command to the error. */
  readonly ms?: number
}

/** What a process has open, and which processes it has started. */
export interface Held {
  readonly descriptors: number
  readonly mappings: number
  readonly children: number
}

export const BARRIER: Call = { kind: 'barrier', tensors: [] }
const PACKAGE = fileURLToPath(new URL('..', import.meta.url))
const WORKER = fileURLToPath(new URL('workers/rank.ts', import.meta.url))

export const SOURCES = ['--import', 'tsx', '--conditions=@rankwise/source']

class RankProcess {
  readonly child: ChildProcess
  readonly exited: Promise<{ code: number | null; signal: NodeJS.Signals | null }>
  readonly #pending = new Map<number, (reply: Reply) => void>()
  #commands = 0

  constructor(env: NodeJS.ProcessEnv) {
    this.child = fork(WORKER, {
      cwd: PACKAGE,
      execArgv: SOURCES,
      serialization: 'advanced',
      env: { ...process.env, ...env },
    })
    this.exited = once(this.child, 'exit').then(([code, signal]) => ({ code, signal }))
    this.child.on('message', (reply: Reply) => this.#pending.get(reply.id)?.(reply))
  }

  /** The reply to a command; never rejects. When the process ends first, the reply is an `EXITED` error. */
  ask(command: Command): Promise<Reply> {
    const id = ++this.#commands
    const reply = new Promise<Reply>((resolve) => this.#pending.set(id, resolve))
    // Whoever has left gets no command; the exit below is the reply.
    if (this.child.connected) this.child.send({ ...command, id })
    const exit = this.exited.then(({ code, signal }) => ({
      id,
      error: { code: 'EXITED', message: `${code} ${signal}` },
    }))
    return Promise.race([reply, exit]).finally(() => this.#pending.delete(id))
  }
}

export interface GroupOptions extends InitOptions {
  readonly timeoutMs?: number
  readonly overrides?: (rank: number) => Partial<EnvironmentRendezvous>
}

/** Processes that form one group after another. Every failure of any rank is reported with the rank. */
export class Ranks implements AsyncDisposable {
  readonly processes: RankProcess[]
  readonly #env: NodeJS.ProcessEnv

  constructor(worldSize: number, env: NodeJS.ProcessEnv = {}) {
    this.#env = env
    this.processes = Array.from({ length: worldSize }, () => new RankProcess(env))
  }

  /**
   * Joins all ranks in a new group, after the last one is left and processes that ended are replaced.
   *
   * @param layout number of ranks of each machine, in rank order
   */
  async init(layout: readonly number[], options: GroupOptions = {}): Promise<void> {
    const replies = await this.tryInit(layout, options)
    throwFailures(replies)
  }

  async tryInit(layout: readonly number[], options: GroupOptions = {}): Promise<Reply[]> {
    await this.ready()
    const masterPort = await freePort()
    const { timeoutMs = 25_000, overrides = () => ({}), ...rest } = options
    const places = layout.flatMap((localWorldSize) =>
      Array.from({ length: localWorldSize }, (_, localRank) => ({ localRank, localWorldSize })),
    )
    return this.settle((rank) => ({
      do: 'init',
      rendezvous: {
        rank,
        worldSize: this.processes.length,
        ...(places[rank] as { localRank: number; localWorldSize: number }),
        masterAddr: '127.0.0.1',
        masterPort,
        timeoutMs,
        token: 'a secret',
        ...overrides(rank),
      },
      options: rest,
    }))
  }

  /** Resolves when all processes run, in no group. */
  async ready(): Promise<void> {
    for (const [rank, { child }] of this.processes.entries()) {
      child.kill('SIGCONT')
      if (!child.connected) this.processes[rank] = new RankProcess(this.#env)
    }
    await this.all(() => ({ do: 'destroy' }))
  }

  /** The values of all ranks. @throws Error with the error of every rank that failed */
  async all(command: (rank: number) => Command): Promise<unknown[]> {
    const replies = await this.settle(command)
    throwFailures(replies)
    return replies.map(({ value }) => value)
  }

  /** The replies of all ranks, whether they failed or not. */
  settle(command: (rank: number) => Command): Promise<Reply[]> {
    return Promise.all(this.processes.map((process, rank) => process.ask(command(rank))))
  }

  ask(rank: number, command: Command): Promise<Reply> {
    return (this.processes[rank] as RankProcess).ask(command)
  }

  kill(rank: number, signal: NodeJS.Signals): void {
    this.processes[rank]?.child.kill(signal)
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const { child } of this.processes) child.kill('SIGKILL')
    await Promise.all(this.processes.map(({ exited }) => exited))
  }
}

function throwFailures(replies: readonly Reply[]): void {
  const failures = replies.flatMap(({ error }, rank) => (error ? [`rank ${rank}: ${error.message}`] : []))
  if (failures.length > 0) throw new Error(failures.join('\n'))
}

async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as { port: number }
  server.close()
  await once(server, 'close')
  return port
}

/** Whether a test can run here; otherwise says loudly what is missing. */
export function isInstalled(what: string, command: string, args: readonly string[]): boolean {
  const found = spawnSync(command, args, { cwd: PACKAGE, stdio: 'ignore' }).status === 0
  if (!found) process.stderr.write(`\nSKIPPED: ${what} is not installed; tests that need it do not run.\n\n`)
  return found
}

/** Loads the library as a rank does. */
export function hasMpich(): boolean {
  const program = "import { loadMpiLibrary } from './src/library.ts'; loadMpiLibrary({})"
  return isInstalled('MPICH (Debian: apt-get install libmpich12)', process.execPath, [
    ...SOURCES,
    '--input-type=module',
    '--eval',
    program,
  ])
}

import { type ChildProcess, fork } from 'node:child_process'
import { once } from 'node:events'
import { createServer } from 'node:net'
import { fileURLToPath } from 'node:url'
import type { DType, EnvironmentRendezvous, ReduceOp } from '@rankwise/core'
import type { LocalCollectivesOptions, TransportName } from '../src/index.ts'

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
  | { do: 'init'; rendezvous: EnvironmentRendezvous; options: LocalCollectivesOptions }
  | { do: 'run'; call: Call }
  | { do: 'runAll'; calls: readonly Call[] }
  | { do: 'random'; seed: number; count: number }
  | { do: 'allocate'; elements: number }
  | { do: 'newGroup'; ranks: readonly number[] }
  | { do: 'kernel' | 'transport' | 'dispose' | 'reduceShared' | 'readShared' | 'untilFailure' }
  | { do: 'abort'; message: string }
  | { do: 'block'; ms: number }
  | { do: 'abortSignal' | 'abortInit' | 'held' | 'destroy' | 'finish' }

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

export interface Held {
  readonly descriptors: number
  readonly mappings: number
}

const WORKER = fileURLToPath(new URL('workers/rank.ts', import.meta.url))
const PACKAGE = fileURLToPath(new URL('..', import.meta.url))

export const BARRIER: Call = { kind: 'barrier', tensors: [] }

export interface GroupOptions extends LocalCollectivesOptions {
  readonly timeoutMs?: number
}

/** One process that is told what to do. */
export class RankProcess {
  readonly child: ChildProcess
  readonly exited: Promise<{ code: number | null; signal: NodeJS.Signals | null }>
  readonly #pending = new Map<number, (reply: Reply) => void>()
  #commands = 0

  /** @param preload a module that the process loads before anything else */
  constructor(preload?: URL) {
    this.child = fork(WORKER, {
      cwd: PACKAGE,
      execArgv: [...(preload ? ['--import', preload.href] : []), '--import', 'tsx', '--conditions=@rankwise/source'],
      serialization: 'advanced',
    })
    this.exited = once(this.child, 'exit').then(([code, signal]) => ({ code, signal }))
    this.child.on('message', (reply: Reply) => this.#pending.get(reply.id)?.(reply))
  }

  get pid(): number {
    return this.child.pid as number
  }

  /** The reply to a command; never rejects. When the process ends first, the reply is an `EXITED` error. */
  ask(command: Command): Promise<Reply> {
    const id = ++this.#commands
    const reply = new Promise<Reply>((resolve) => this.#pending.set(id, resolve))
    this.child.send({ ...command, id })
    const exit = this.exited.then(({ code, signal }) => ({
      id,
      error: { code: 'EXITED', message: `${code} ${signal}` },
    }))
    return Promise.race([reply, exit]).finally(() => this.#pending.delete(id))
  }
}

/** Processes that form one group after another. Every failure of any rank is reported with the rank. */
export class Ranks implements AsyncDisposable {
  readonly processes: RankProcess[]
  readonly #killed = new Set<RankProcess>()

  constructor(worldSize: number) {
    this.processes = Array.from({ length: worldSize }, () => new RankProcess())
  }

  /** Joins all ranks in a new group, after the last one is left and processes that ended are replaced. */
  async init(
    options: GroupOptions = {},
    optionsOf: (rank: number) => LocalCollectivesOptions = () => ({}),
  ): Promise<void> {
    await this.ready()
    const port = await freePort()
    const { timeoutMs = 20_000, ...rest } = options
    await this.all((rank) => ({
      do: 'init',
      rendezvous: rendezvous(rank, this.processes.length, port, { timeoutMs }),
      options: { ...rest, ...optionsOf(rank) },
    }))
  }

  /** Resolves when all processes run, in no group. */
  async ready(): Promise<void> {
    for (const [rank, process] of this.processes.entries()) {
      process.child.kill('SIGCONT')
      // A process that was killed may still look as if it could be spoken to.
      if (this.#killed.has(process)) await process.exited
      if (!process.child.connected) this.processes[rank] = new RankProcess()
    }
    await this.all(() => ({ do: 'destroy' }))
  }

  /** The values of all ranks. @throws Error with the error of every rank that failed */
  async all(command: (rank: number) => Command): Promise<unknown[]> {
    const replies = await this.settle(command)
    const failures = replies.flatMap(({ error }, rank) => (error ? [`rank ${rank}: ${error.message}`] : []))
    if (failures.length > 0) throw new Error(failures.join('\n'))
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
    const process = this.processes[rank] as RankProcess
    process.child.kill(signal)
    if (signal === 'SIGKILL') this.#killed.add(process)
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const { child } of this.processes) child.kill('SIGKILL')
    await Promise.all(this.processes.map(({ exited }) => exited))
  }
}

/** The rendezvous of one rank on this machine. */
export function rendezvous(
  rank: number,
  worldSize: number,
  masterPort: number,
  overrides: Partial<EnvironmentRendezvous> = {},
): EnvironmentRendezvous {
  return {
    rank,
    worldSize,
    localRank: rank,
    localWorldSize: worldSize,
    masterAddr: '127.0.0.1',
    masterPort,
    timeoutMs: 20_000,
    ...overrides,
  }
}

export async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as { port: number }
  server.close()
  await once(server, 'close')
  return port
}

/** How the survivors say that the process of a rank has ended. */
export function endOf(transport: TransportName, rank: number): RegExp {
  if (transport === 'shm') return new RegExp(`the process of rank ${rank} has ended`)
  return new RegExp(`lost rank ${rank} \\(process \\d+\\): its process has ended`)
}

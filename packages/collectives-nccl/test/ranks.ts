import { type ChildProcess, fork } from 'node:child_process'
import { once } from 'node:events'
import { fileURLToPath } from 'node:url'
import type { DType, ReduceOp } from '@rankwise/core'
import type { NcclCollectivesOptions } from '../src/index.ts'
import { StoreHost } from './ipc-store.ts'
import { Stub } from './stub.ts'

export type StoreQuestion = { set: string; value: Uint8Array } | { get: string } | { add: string; amount: number }
export interface StoreAnswer {
  readonly answer: number
  readonly value: unknown
}

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
  /** In memory of the "device". */
  readonly onDevice?: boolean
}

export type GroupOptions = Omit<NcclCollectivesOptions, 'store' | 'signal'> & {
  readonly timeoutMs?: number
  /** Takes the store of the rendezvous at this port of 127.0.0.1, instead of that of the test. */
  readonly masterPort?: number
}

export type Command =
  | { do: 'init'; worldSize: number; rank: number; options: GroupOptions; env: Record<string, string> }
  | { do: 'run'; call: Call }
  | { do: 'runAll'; calls: readonly Call[] }
  | { do: 'abort'; message: string }
  | { do: 'env'; env: Record<string, string> }
  | { do: 'block'; ms: number }
  | { do: 'abortSignal' | 'breakStore' | 'held' | 'destroy' | 'finish' }

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

const WORKER = fileURLToPath(new URL('workers/rank.ts', import.meta.url))
const PACKAGE = fileURLToPath(new URL('..', import.meta.url))

export const BARRIER: Call = { kind: 'barrier', tensors: [] }

/** One process that is told what to do. */
export class RankProcess {
  readonly child: ChildProcess
  readonly exited: Promise<{ code: number | null; signal: NodeJS.Signals | null }>
  store = new StoreHost()
  readonly #pending = new Map<number, (reply: Reply) => void>()
  #commands = 0

  constructor() {
    this.child = fork(WORKER, {
      cwd: PACKAGE,
      execArgv: ['--import', 'tsx', '--conditions=@rankwise/source'],
      serialization: 'advanced',
    })
    this.exited = once(this.child, 'exit').then(([code, signal]) => ({ code, signal }))
    this.child.on('message', (message: Reply | (StoreQuestion & { question: number })) => {
      if ('question' in message) this.#answer(message)
      else this.#pending.get(message.id)?.(message)
    })
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

  #answer(question: StoreQuestion & { question: number }): void {
    const answer: StoreAnswer = { answer: question.question, value: this.store.answer(question) }
    if (this.child.connected) this.child.send(answer)
  }
}

/** Processes that form one group after another over the stub. Every failure of any rank is reported with the rank. */
export class Ranks implements AsyncDisposable {
  readonly stub = new Stub()
  readonly processes: RankProcess[]
  /** Name of the files in which the ranks of the current group record their calls. */
  log = 'none'
  #groups = 0

  constructor(worldSize: number) {
    this.processes = Array.from({ length: worldSize }, () => new RankProcess())
  }

  /** Joins all ranks in a new group. @throws Error with the error of every rank that failed */
  async init(options: GroupOptions = {}): Promise<void> {
    const failures = (await this.tryInit(() => ({ options }))).flatMap(({ error }, rank) =>
      error ? [`rank ${rank}: ${error.message}`] : [],
    )
    if (failures.length > 0) throw new Error(failures.join('\n'))
  }

  /** As {@link init}, with the replies of ranks that may fail, and options and environment for each. */
  async tryInit(
    of: (rank: number) => { options?: GroupOptions; env?: Record<string, string>; stays?: 'away' },
  ): Promise<Reply[]> {
    await this.ready()
    const worldSize = this.processes.length
    return Promise.all(
      this.processes.map((process, rank) => {
        const { options = {}, env = {}, stays } = of(rank)
        if (stays === 'away') return { id: 0, value: 'away' }
        const all = { ...this.stub.env(rank, this.log), ...env }
        return process.ask({ do: 'init', rank, worldSize, options: { timeoutMs: 20_000, ...options }, env: all })
      }),
    )
  }

  /** Resolves when all processes run, in no group, with a store and files of their own. */
  async ready(): Promise<void> {
    const store = new StoreHost()
    for (const [rank, { child }] of this.processes.entries()) {
      child.kill('SIGCONT')
      if (!child.connected) this.processes[rank] = new RankProcess()
    }
    await this.all(() => ({ do: 'destroy' }))
    for (const process of this.processes) process.store = store
    this.log = `log-${++this.#groups}`
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

  run(rank: number, call: Call): Promise<Reply> {
    return this.ask(rank, { do: 'run', call })
  }

  /** Makes the stub of one rank misbehave from now on. */
  async inject(rank: number, fault: string): Promise<void> {
    await this.ask(rank, { do: 'env', env: { STUB_FAULT: fault } })
  }

  calls(rank: number): string[] {
    return this.stub.calls(rank, this.log)
  }

  kill(rank: number, signal: NodeJS.Signals): void {
    this.processes[rank]?.child.kill(signal)
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const { child } of this.processes) child.kill('SIGKILL')
    await Promise.all(this.processes.map(({ exited }) => exited))
    this.stub[Symbol.dispose]()
  }
}

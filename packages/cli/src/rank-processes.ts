import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { constants } from 'node:os'
import type { Readable, Writable } from 'node:stream'
import { RankwiseError } from '@rankwise/core'
import { OrphanGuard } from './orphan-guard.ts'
import { prefixLines } from './prefix-lines.ts'
import { type Attempt, type Machine, rankEnvironment } from './rank-environment.ts'

/** Where the output of ranks goes. */
export interface OutputOptions {
  /** Begin each line that a rank writes with `[rank] `; otherwise ranks write to this process's output. @default false */
  readonly prefix?: boolean
  /** With `prefix`, let rank 0 write directly nevertheless, so that its progress bars work. @default false */
  readonly inheritRank0?: boolean
  /** Where prefixed output goes. @default process.stdout */
  readonly stdout?: Writable
  /** Where prefixed errors and the messages of the launcher go. @default process.stderr */
  readonly stderr?: Writable
}

interface RankProcessesOptions extends OutputOptions {
  readonly command: readonly string[]
  readonly env?: Readonly<Record<string, string | undefined>>
  readonly graceMs?: number
  readonly signal?: AbortSignal | undefined
}

/** How the ranks have ended. */
export interface Ending {
  /** That of the rank that failed first, 128 + n for signal n; 0 when none failed. */
  readonly exitCode: number
  /** Whether they were told to end from outside. */
  readonly isStopped: boolean
}

const GRACE_MS = 5_000

/**
 * How long the peers of a failed rank may go on. They notice within 0.1 s that it is gone and say what they were doing;
 * stopped at once, they could not.
 */
const REPORT_MS = 500

const FORWARDED: readonly NodeJS.Signals[] = ['SIGINT', 'SIGTERM', 'SIGHUP']

/** The ranks of one attempt on this machine, from the first start to the last end. */
export class RankProcesses {
  readonly #options: RankProcessesOptions
  readonly #machine: Machine
  readonly #attempt: Attempt
  readonly #stdout: Writable
  readonly #stderr: Writable
  readonly #running = new Set<ChildProcess>()
  readonly #timers: NodeJS.Timeout[] = []
  #exitCode = 0
  #failure: Error | undefined
  #stopping = false
  #isStopped = false

  constructor(options: RankProcessesOptions, machine: Machine, attempt: Attempt) {
    this.#options = options
    this.#machine = machine
    this.#attempt = attempt
    this.#stdout = options.stdout ?? process.stdout
    this.#stderr = options.stderr ?? process.stderr
  }

  /** @throws RankwiseError `LAUNCH_FAILED`, `ABORTED`; and what the output failed with */
  async run(): Promise<Ending> {
    const release = this.#listen()
    try {
      using guard = new OrphanGuard(this.#graceMs, (cause) => this.#fail(notStarted(['/bin/sh'], cause)))
      const localRanks = Array.from({ length: this.#machine.nprocPerNode }, (_, rank) => rank)
      await Promise.all(localRanks.map((localRank) => this.#runRank(localRank, guard)))
    } finally {
      for (const timer of this.#timers) clearTimeout(timer)
      release()
    }
    if (this.#failure !== undefined) throw this.#failure
    return { exitCode: this.#exitCode, isStopped: this.#isStopped }
  }

  get #graceMs(): number {
    return this.#options.graceMs ?? GRACE_MS
  }

  /** Takes over signals and errors of this process; returns what gives them back. */
  #listen(): () => void {
    const { signal } = this.#options
    const forward = (name: NodeJS.Signals) => {
      this.#isStopped = true
      this.#stop(name)
    }
    const abort = () => this.#fail(aborted(signal as AbortSignal))
    const outputFailed = (error: Error) => this.#fail(error)
    const exit = () => this.#kill('SIGKILL')
    for (const name of FORWARDED) process.on(name, forward)
    for (const stream of [this.#stdout, this.#stderr]) stream.on('error', outputFailed)
    process.on('exit', exit)
    signal?.addEventListener('abort', abort)
    return () => {
      for (const name of FORWARDED) process.off(name, forward)
      for (const stream of [this.#stdout, this.#stderr]) stream.off('error', outputFailed)
      process.off('exit', exit)
      signal?.removeEventListener('abort', abort)
    }
  }

  /** Resolves when the rank has ended and all it wrote is passed on. */
  async #runRank(localRank: number, guard: OrphanGuard): Promise<void> {
    try {
      const child = this.#spawn(localRank)
      const rank = this.#rankOf(localRank)
      this.#running.add(child)
      await Promise.all([
        this.#watch(rank, child, guard),
        this.#pass(rank, child.stdout, this.#stdout),
        this.#pass(rank, child.stderr, this.#stderr),
      ])
    } catch (cause) {
      this.#fail(notStarted(this.#options.command, cause))
    }
  }

  #spawn(localRank: number): ChildProcess {
    const { command, env = process.env, prefix = false, inheritRank0 = false } = this.#options
    const [program, ...args] = command as [string, ...string[]]
    const isRank0 = this.#rankOf(localRank) === 0
    const output = prefix && !(isRank0 && inheritRank0) ? 'pipe' : 'inherit'
    return spawn(program, args, {
      env: { ...env, ...rankEnvironment(localRank, this.#machine, this.#attempt) },
      stdio: [isRank0 ? 'inherit' : 'ignore', output, output],
      // A process group of its own: signals reach what the rank itself has started, and Ctrl-C reaches it only once.
      detached: true,
    })
  }

  #rankOf(localRank: number): number {
    return this.#machine.nodeRank * this.#machine.nprocPerNode + localRank
  }

  /** @throws the error of the system when the rank could not be started */
  async #watch(rank: number, child: ChildProcess, guard: OrphanGuard): Promise<void> {
    try {
      if (child.pid !== undefined) guard.started(child.pid)
      const [code, signal] = (await once(child, 'exit')) as [number | null, NodeJS.Signals | null]
      // What the rank has started and left behind ends with it.
      killGroup(child, 'SIGKILL')
      guard.ended(child.pid as number)
      if (code !== 0) this.#rankFailed(rank, code, signal)
    } finally {
      this.#running.delete(child)
    }
  }

  async #pass(rank: number, from: Readable | null, to: Writable): Promise<void> {
    if (from === null) return
    try {
      await prefixLines(from, to, `[${rank}] `)
    } catch (error) {
      this.#fail(error as Error)
    }
  }

  #rankFailed(rank: number, code: number | null, signal: NodeJS.Signals | null): void {
    if (this.#exitCode !== 0 || this.#failure !== undefined) return
    this.#exitCode = code ?? 128 + constants.signals[signal as NodeJS.Signals]
    if (this.#stopping) return
    const how = signal === null ? `failed with exit code ${code}` : `was ended by ${signal}`
    this.#stderr.write(`rankwise: rank ${rank} ${how}; stopping the others\n`)
    this.#timers.push(setTimeout(() => this.#stop('SIGTERM'), REPORT_MS))
  }

  #fail(error: Error): void {
    this.#failure ??= error
    this.#stop('SIGTERM')
  }

  /** Sends a signal to every rank, and SIGKILL after the grace period. */
  #stop(signal: NodeJS.Signals): void {
    this.#kill(signal)
    if (this.#stopping) return
    this.#stopping = true
    this.#timers.push(setTimeout(() => this.#kill('SIGKILL'), this.#graceMs))
  }

  #kill(signal: NodeJS.Signals): void {
    for (const child of this.#running) killGroup(child, signal)
  }
}

function killGroup({ pid }: ChildProcess, signal: NodeJS.Signals): void {
  if (pid === undefined) return
  try {
    process.kill(-pid, signal)
  } catch {
    // The group is empty: all of it has ended.
  }
}

export function aborted({ reason }: AbortSignal): RankwiseError {
  return new RankwiseError('ABORTED', 'the launch was aborted', { cause: reason })
}

function notStarted([program]: readonly string[], cause: unknown): RankwiseError {
  return new RankwiseError('LAUNCH_FAILED', 'the command cannot be started', {
    where: program as string,
    actual: { reason: (cause as NodeJS.ErrnoException).code ?? String(cause) },
    rule: 'the first part of the command is an executable file or a name found on PATH',
    cause,
  })
}

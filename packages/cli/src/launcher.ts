import { type ChildProcess, spawn } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { type AddressInfo, createServer } from 'node:net'
import { constants } from 'node:os'
import type { Readable, Writable } from 'node:stream'
import { RankwiseError } from '@rankwise/core'
import { prefixLines } from './prefix-lines.ts'

export interface LaunchOptions {
  /** Program and arguments; every rank runs the same. */
  readonly command: readonly string[]
  /** Number of ranks. */
  readonly nprocPerNode: number
  /** Environment of the ranks, without the variables that tell them their rank. @default process.env */
  readonly env?: Readonly<Record<string, string | undefined>>
  /** Longest wait of a rank for its peers, in milliseconds; ranks decide when left out. */
  readonly timeoutMs?: number
  /** Begin each line that a rank writes with `[rank] `; otherwise ranks write to this process's output. @default false */
  readonly prefix?: boolean
  /** With `prefix`, let rank 0 write directly nevertheless, so that its progress bars work. @default false */
  readonly inheritRank0?: boolean
  /** Where prefixed output goes. @default process.stdout */
  readonly stdout?: Writable
  /** Where prefixed errors and the messages of the launcher go. @default process.stderr */
  readonly stderr?: Writable
  /** Time from SIGTERM to SIGKILL for ranks that do not end, in milliseconds. @default 5000 */
  readonly graceMs?: number
  /** Stops all ranks and fails the launch with `ABORTED`. */
  readonly signal?: AbortSignal | undefined
}

const LOCALHOST = '127.0.0.1'
const GRACE_MS = 5_000

/**
 * How long the peers of a failed rank may go on. They notice within 0.1 s that it is gone and say what they were doing;
 * stopped at once, they could not.
 */
const REPORT_MS = 500

const FORWARDED: readonly NodeJS.Signals[] = ['SIGINT', 'SIGTERM', 'SIGHUP']

/**
 * Runs one command as several ranks on this machine and resolves when all have ended, as torchrun does: each rank finds
 * `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` and `RANKWISE_TOKEN` in its
 * environment. When one fails, the others are stopped. SIGINT, SIGTERM and SIGHUP are passed on to the ranks.
 *
 * @returns the exit code of the rank that failed first, 128 + n for signal n; 0 when none failed
 * @throws RankwiseError `LAUNCH_OPTIONS`, `LAUNCH_FAILED` when the command cannot be started, `ABORTED`
 */
export async function launch(options: LaunchOptions): Promise<number> {
  requireOptions(options)
  if (options.signal?.aborted === true) throw aborted(options.signal)
  const rendezvous = {
    MASTER_ADDR: LOCALHOST,
    MASTER_PORT: String(await freePort()),
    RANKWISE_TOKEN: randomBytes(32).toString('hex'),
    ...(options.timeoutMs === undefined ? {} : { RANKWISE_TIMEOUT_MS: String(options.timeoutMs) }),
  }
  return new Launch(options).run(rendezvous)
}

/** The ranks of one launch, from the first start to the last end. */
class Launch {
  readonly #options: LaunchOptions
  readonly #stdout: Writable
  readonly #stderr: Writable
  readonly #running = new Set<ChildProcess>()
  readonly #timers: NodeJS.Timeout[] = []
  #exitCode = 0
  #failure: Error | undefined
  #stopping = false

  constructor(options: LaunchOptions) {
    this.#options = options
    this.#stdout = options.stdout ?? process.stdout
    this.#stderr = options.stderr ?? process.stderr
  }

  async run(rendezvous: Readonly<Record<string, string>>): Promise<number> {
    const release = this.#listen()
    try {
      const ranks = Array.from({ length: this.#options.nprocPerNode }, (_, rank) => rank)
      await Promise.all(ranks.map((rank) => this.#runRank(rank, rendezvous)))
    } finally {
      for (const timer of this.#timers) clearTimeout(timer)
      release()
    }
    if (this.#failure !== undefined) throw this.#failure
    return this.#exitCode
  }

  /** Takes over signals and errors of this process; returns what gives them back. */
  #listen(): () => void {
    const { signal } = this.#options
    const forward = (name: NodeJS.Signals) => this.#stop(name)
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
  async #runRank(rank: number, rendezvous: Readonly<Record<string, string>>): Promise<void> {
    try {
      const child = this.#spawn(rank, rendezvous)
      this.#running.add(child)
      await Promise.all([
        this.#watch(rank, child),
        this.#pass(rank, child.stdout, this.#stdout),
        this.#pass(rank, child.stderr, this.#stderr),
      ])
    } catch (cause) {
      this.#fail(notStarted(this.#options.command, cause))
    }
  }

  #spawn(rank: number, rendezvous: Readonly<Record<string, string>>): ChildProcess {
    const { command, nprocPerNode, env = process.env, prefix = false, inheritRank0 = false } = this.#options
    const [program, ...args] = command as [string, ...string[]]
    const ranks = String(nprocPerNode)
    const output = prefix && !(rank === 0 && inheritRank0) ? 'pipe' : 'inherit'
    return spawn(program, args, {
      env: {
        ...env,
        ...rendezvous,
        RANK: `${rank}`,
        LOCAL_RANK: `${rank}`,
        WORLD_SIZE: ranks,
        LOCAL_WORLD_SIZE: ranks,
      },
      stdio: [rank === 0 ? 'inherit' : 'ignore', output, output],
      // A process group of its own: signals reach what the rank itself has started, and Ctrl-C reaches it only once.
      detached: true,
    })
  }

  /** @throws the error of the system when the rank could not be started */
  async #watch(rank: number, child: ChildProcess): Promise<void> {
    try {
      const [code, signal] = (await once(child, 'exit')) as [number | null, NodeJS.Signals | null]
      // What the rank has started and left behind ends with it.
      killGroup(child, 'SIGKILL')
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
    this.#timers.push(setTimeout(() => this.#kill('SIGKILL'), this.#options.graceMs ?? GRACE_MS))
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

async function freePort(): Promise<number> {
  const server = createServer().listen(0, LOCALHOST)
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  server.close()
  await once(server, 'close')
  return port
}

function requireOptions({ command, nprocPerNode, timeoutMs = 1, graceMs = 0 }: LaunchOptions): void {
  const refuse = (rule: string, actual: Readonly<Record<string, unknown>>) =>
    new RankwiseError('LAUNCH_OPTIONS', 'ranks cannot be launched like this', { actual, rule })
  if (command.length === 0) throw refuse('command names a program', { command: 'empty' })
  if (!isInteger(nprocPerNode, 1)) throw refuse('nprocPerNode is a positive integer', { nprocPerNode })
  if (!isInteger(timeoutMs, 1)) throw refuse('timeoutMs is a positive integer', { timeoutMs })
  if (!isInteger(graceMs, 0)) throw refuse('graceMs is an integer of at least 0', { graceMs })
}

/** Up to what a timer of Node takes. */
function isInteger(value: number, least: number): boolean {
  return Number.isInteger(value) && value >= least && value < 2 ** 31
}

function aborted({ reason }: AbortSignal): RankwiseError {
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

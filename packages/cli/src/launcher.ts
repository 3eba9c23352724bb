import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { type AddressInfo, createServer } from 'node:net'
import { RankwiseError } from '@rankwise/core'
import type { Attempt, Machine } from './rank-environment.ts'
import { aborted, type OutputOptions, RankProcesses } from './rank-processes.ts'

export interface LaunchOptions extends OutputOptions {
  /** Program and arguments; every rank runs the same. */
  readonly command: readonly string[]
  /** Number of ranks on this machine; the same on all. */
  readonly nprocPerNode: number
  /** Number of machines; a launcher runs on each. @default 1 */
  readonly nnodes?: number
  /** Number of this machine, from 0. @default 0 */
  readonly nodeRank?: number
  /** Address of machine 0, where rank 0 listens. @default 127.0.0.1; required for several machines */
  readonly masterAddr?: string
  /** Port where rank 0 listens. @default a free one for each attempt; required for several machines */
  readonly masterPort?: number
  /** How often all ranks of this machine are stopped and started again after one has failed. @default 0 */
  readonly maxRestarts?: number
  /** Environment of the ranks, without the variables that tell them their rank. @default process.env */
  readonly env?: Readonly<Record<string, string | undefined>>
  /** Longest wait of a rank for its peers, in milliseconds; ranks decide when left out. */
  readonly timeoutMs?: number
  /** Time from SIGTERM to SIGKILL for ranks that do not end, in milliseconds. @default 5000 */
  readonly graceMs?: number
  /** Stops all ranks and fails the launch with `ABORTED`. */
  readonly signal?: AbortSignal | undefined
}

const LOCALHOST = '127.0.0.1'

/**
 * Runs one command as several ranks on this machine and resolves when all have ended, as torchrun does: each rank finds
 * `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `RANKWISE_TOKEN` and
 * `TORCHELASTIC_RESTART_COUNT` in its environment. When one fails, the others are stopped, and all are started again as
 * often as `maxRestarts` says. SIGINT, SIGTERM and SIGHUP are passed on to the ranks. No rank outlives the launcher.
 *
 * One machine gets a random token for each attempt; several share the one in `RANKWISE_TOKEN` of `env`.
 *
 * @returns the exit code of the rank that failed first in the last attempt, 128 + n for signal n; 0 when none failed
 * @throws RankwiseError `LAUNCH_OPTIONS`, `LAUNCH_FAILED` when the command cannot be started, `ABORTED`
 */
export async function launch(options: LaunchOptions): Promise<number> {
  requireOptions(options)
  const { nprocPerNode, nnodes = 1, nodeRank = 0, maxRestarts = 0, signal } = options
  const machine: Machine = { nprocPerNode, nnodes, nodeRank }
  for (let restartCount = 0; ; restartCount++) {
    if (signal?.aborted === true) throw aborted(signal)
    const ranks = new RankProcesses(options, machine, await attemptOf(options, restartCount))
    const { exitCode, isStopped } = await ranks.run()
    if (exitCode === 0 || isStopped || restartCount === maxRestarts) return exitCode
    const stderr = options.stderr ?? process.stderr
    stderr.write(`rankwise: starting all ranks again (restart ${restartCount + 1} of ${maxRestarts})\n`)
  }
}

async function attemptOf(options: LaunchOptions, restartCount: number): Promise<Attempt> {
  const { nnodes = 1, masterAddr = LOCALHOST, masterPort, maxRestarts = 0, timeoutMs } = options
  return {
    masterAddr,
    masterPort: masterPort ?? (await freePort(masterAddr)),
    token: nnodes > 1 ? (sharedToken(options) as string) : randomBytes(32).toString('hex'),
    timeoutMs,
    restartCount,
    maxRestarts,
  }
}

function sharedToken({ env = process.env }: LaunchOptions): string | undefined {
  return env.RANKWISE_TOKEN
}

/** @throws RankwiseError `LAUNCH_OPTIONS` when the address is none of this machine */
async function freePort(host: string): Promise<number> {
  const server = createServer()
  try {
    await once(server.listen(0, host), 'listening')
  } catch (cause) {
    throw refused('masterAddr is an address of this machine', { masterAddr: host }, cause)
  }
  const { port } = server.address() as AddressInfo
  server.close()
  await once(server, 'close')
  return port
}

function requireOptions(options: LaunchOptions): void {
  const { command, nprocPerNode, nnodes = 1, nodeRank = 0, masterAddr, masterPort = 1, maxRestarts = 0 } = options
  const { timeoutMs = 1, graceMs = 0 } = options
  if (command.length === 0) throw refused('command names a program', { command: 'empty' })
  if (!isInteger(nprocPerNode, 1)) throw refused('nprocPerNode is a positive integer', { nprocPerNode })
  if (!isInteger(nnodes, 1)) throw refused('nnodes is a positive integer', { nnodes })
  if (!isInteger(nodeRank, 0) || nodeRank >= nnodes) {
    throw refused('nodeRank is an integer from 0 to nnodes - 1', { nodeRank, nnodes })
  }
  if (!isInteger(masterPort, 1) || masterPort > 65_535) {
    throw refused('masterPort is an integer from 1 to 65535', { masterPort })
  }
  if (masterAddr !== undefined && !/^\S+$/.test(masterAddr)) {
    throw refused('masterAddr is a host name or an IP address', { masterAddr: JSON.stringify(masterAddr) })
  }
  if (!isInteger(maxRestarts, 0)) throw refused('maxRestarts is an integer of at least 0', { maxRestarts })
  if (!isInteger(timeoutMs, 1)) throw refused('timeoutMs is a positive integer', { timeoutMs })
  if (!isInteger(graceMs, 0)) throw refused('graceMs is an integer of at least 0', { graceMs })
  if (nnodes > 1) requireShared(options)
}

/** What launchers of several machines cannot choose by themselves. */
function requireShared(options: LaunchOptions): void {
  const { nnodes, masterAddr, masterPort } = options
  if (masterAddr === undefined || masterPort === undefined) {
    throw refused('masterAddr and masterPort are given for several machines', { nnodes, masterAddr, masterPort })
  }
  if ((sharedToken(options) ?? '') !== '') return
  throw new RankwiseError('LAUNCH_OPTIONS', 'the machines share no token', {
    where: 'environment variable RANKWISE_TOKEN',
    actual: { nnodes, RANKWISE_TOKEN: 'unset' },
    rule: 'ranks of several machines show the same random token, so that nobody else on the network gets in',
    remedy: 'make one with `openssl rand -hex 32` and export it as RANKWISE_TOKEN on every machine',
  })
}

/** Up to what a timer of Node takes. */
function isInteger(value: number, least: number): boolean {
  return Number.isInteger(value) && value >= least && value < 2 ** 31
}

function refused(rule: string, actual: Readonly<Record<string, unknown>>, cause?: unknown): RankwiseError {
  return new RankwiseError('LAUNCH_OPTIONS', 'ranks cannot be launched like this', { actual, rule, cause })
}

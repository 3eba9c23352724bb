import { createHash } from 'node:crypto'
import type { Rendezvous } from './collectives.ts'
import { RankwiseError } from './errors.ts'
import { findLauncher, type Launcher, type Place, requireVariable } from './rendezvous-launchers.ts'
import { type Environment, integer, invalid, optionalInteger } from './rendezvous-variables.ts'

export type { Environment } from './rendezvous-variables.ts'

/** What the environment says about the group, with the secret of the launch. */
export interface EnvironmentRendezvous extends Rendezvous {
  /**
   * A secret that every rank of one launch shares, so that strangers on the port change nothing: `RANKWISE_TOKEN`, or
   * what OpenMPI's mpirun gives its ranks. Its bits are random, as 32 random bytes in hexadecimal digits.
   */
  readonly token?: string | undefined
  /** `TORCHELASTIC_RESTART_COUNT`: how often the launcher has started all ranks again. @default 0 */
  readonly restartCount?: number | undefined
  /** Rank 0 takes the first free one of so many ports, from `masterPort` on; the others look at all. @default 1 */
  readonly portCount?: number | undefined
  /** What the ports were derived from, if they were: tells apart two jobs that got the same ones. No secret. */
  readonly jobId?: string | undefined
  /** The run whose agent (torchrun) holds the store at `masterAddr:masterPort`; left out when rank 0 holds it. */
  readonly agentRunId?: string | undefined
}

/** Ten minutes, as torch.distributed waits with NCCL: the slowest rank may still be reading weights. */
export const DEFAULT_TIMEOUT_MS = 600_000

// The longest delay that a timer of Node takes.
const MAX_TIMEOUT_MS = 2 ** 31 - 1

const LOOPBACK = '127.0.0.1'

/** Ports that a job id stands for: below those that systems give to outgoing connections (Linux: from 32768). */
const FIRST_PORT = 12_288
const PORT_BLOCKS = 2_560
const BLOCK_PORTS = 8

/**
 * Reads how this process finds its group from the variables that its launcher sets:
 *
 * | launcher | rank and world size | of this machine |
 * |---|---|---|
 * | torchrun, `rankwise run` | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
 * | mpirun of OpenMPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `_LOCAL_SIZE` |
 * | mpiexec of MPICH | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
 * | srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` |
 *
 * The first of them counts that has set its rank; with none of their variables set, the process is rank 0 of 1. Those of
 * the machine may be left out together: then all ranks are on this machine.
 *
 * The ranks meet at `MASTER_ADDR` and `MASTER_PORT`. Where the launcher does not set them, as mpirun and srun, they are
 * 127.0.0.1, or the first host of srun's list, and 8 ports that the id of the job stands for.
 *
 * `RANKWISE_TIMEOUT_MS` is the longest wait in milliseconds, `RANKWISE_TOKEN` the secret of the launch.
 *
 * @param env @default process.env
 * @throws RankwiseError `RENDEZVOUS_ENV` when a variable is missing, malformed or contradicts another.
 */
export function rendezvousFromEnv(env: Environment = process.env): EnvironmentRendezvous {
  const timeoutMs = optionalInteger(env, 'RANKWISE_TIMEOUT_MS', 1, MAX_TIMEOUT_MS) ?? DEFAULT_TIMEOUT_MS
  const token = tokenOf(env)
  const launcher = findLauncher(env)
  if (launcher === undefined) return { ...ALONE, timeoutMs, token }

  const place = launcher.place(env)
  return {
    ...place,
    ...meetingPoint(env, launcher, place),
    timeoutMs,
    token: token ?? derivedToken(launcher.secret(env)),
    restartCount: optionalInteger(env, 'TORCHELASTIC_RESTART_COUNT', 0, Number.MAX_SAFE_INTEGER),
    agentRunId: agentRunId(env),
  }
}

const ALONE = { rank: 0, localRank: 0, worldSize: 1, localWorldSize: 1, masterAddr: LOOPBACK, masterPort: 0 }

function meetingPoint(env: Environment, launcher: Launcher, place: Place) {
  const jobId = launcher.jobId(env)
  if (jobId === undefined) {
    for (const name of ['MASTER_ADDR', 'MASTER_PORT']) requireMaster(env, launcher, name)
  }
  const masterAddr = env.MASTER_ADDR === undefined ? defaultHost(env, launcher, place) : address(env, 'MASTER_ADDR')
  if (env.MASTER_PORT !== undefined) return { masterAddr, masterPort: integer(env, 'MASTER_PORT', 1, 65_535) }
  return { masterAddr, ...derivedPorts(jobId as string) }
}

function requireMaster(env: Environment, launcher: Launcher, name: string): void {
  if (env[name] !== undefined) return
  if (launcher.rankName === 'RANK') requireVariable(env, name, TORCHRUN_FAMILY)
  throw invalid(
    name,
    undefined,
    `${name} is set when ${launcher.name} does not tell ranks apart from other jobs`,
    SET_BOTH,
  )
}

const TORCHRUN_FAMILY = ['RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE']
const SET_BOTH =
  'set MASTER_ADDR to an address of the machine of rank 0 and MASTER_PORT to a free port, for all ranks ' +
  '(mpirun -x NAME=VALUE, mpiexec -genv NAME VALUE)'

function defaultHost(env: Environment, launcher: Launcher, { worldSize, localWorldSize }: Place): string {
  const host = localWorldSize === worldSize ? LOOPBACK : launcher.masterHost(env)
  if (host !== undefined) return host
  throw invalid('MASTER_ADDR', undefined, 'MASTER_ADDR is set when ranks are on several machines', SET_BOTH)
}

/** Two jobs may get the same ports: then each finds free ones among them, and the handshake tells the jobs apart. */
function derivedPorts(job: string) {
  // What tells launches apart may be a secret of the launcher, which is not passed on.
  const hash = createHash('sha256').update(`rankwise job ${job}`).digest()
  const masterPort = FIRST_PORT + (hash.readUInt32LE() % PORT_BLOCKS) * BLOCK_PORTS
  return { masterPort, portCount: BLOCK_PORTS, jobId: hash.toString('hex') }
}

/** The secret itself belongs to the launcher. */
function derivedToken(secret: string | undefined): string | undefined {
  return secret === undefined ? undefined : createHash('sha256').update(`rankwise token ${secret}`).digest('hex')
}

function tokenOf(env: Environment): string | undefined {
  if (env.RANKWISE_TOKEN !== '') return env.RANKWISE_TOKEN
  throw new RankwiseError('RENDEZVOUS_ENV', 'is empty', {
    where: 'environment variable RANKWISE_TOKEN',
    actual: { RANKWISE_TOKEN: '""' },
    rule: 'RANKWISE_TOKEN is a secret, or unset',
    remedy: 'export RANKWISE_TOKEN=$(openssl rand -hex 32), the same for all ranks',
  })
}

/** torchrun tells its ranks with this variable that its agent listens at MASTER_PORT itself. */
function agentRunId(env: Environment): string | undefined {
  const hasAgent = env.TORCHELASTIC_USE_AGENT_STORE?.toLowerCase() === 'true'
  return hasAgent ? (env.TORCHELASTIC_RUN_ID ?? '') : undefined
}

function address(env: Environment, name: string): string {
  const text = env[name] ?? ''
  if (text === '' || /\s/.test(text)) throw invalid(name, text, `${name} is a host name or an IP address`)
  return text
}

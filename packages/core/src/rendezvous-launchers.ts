import { readlinkSync } from 'node:fs'
import { RankwiseError } from './errors.ts'
import { type Environment, integer, invalid } from './rendezvous-variables.ts'
import { expandHostList, expandTaskCounts } from './slurm-lists.ts'

/** Which rank a process is. */
export interface Place {
  readonly rank: number
  readonly worldSize: number
  readonly localRank: number
  readonly localWorldSize: number
}

/** A program that starts ranks, and what it tells them. */
export interface Launcher {
  readonly name: string
  /** The variable that holds the rank. */
  readonly rankName: string
  place(env: Environment): Place
  /** What all ranks of one launch share and no other launch has; undefined when there is nothing like that. */
  jobId(env: Environment): string | undefined
  /** A secret that only the ranks of one launch know; undefined when there is none. */
  secret(env: Environment): string | undefined
  /** The host of rank 0, where it is known. */
  masterHost(env: Environment): string | undefined
}

interface Names {
  readonly rank: string
  readonly worldSize: string
  readonly localRank: string
  readonly localWorldSize: string
}

const nothing = () => undefined

/** The variables of torchrun and of `rankwise run`. */
const TORCHRUN_NAMES: Names = {
  rank: 'RANK',
  worldSize: 'WORLD_SIZE',
  localRank: 'LOCAL_RANK',
  localWorldSize: 'LOCAL_WORLD_SIZE',
}

const TORCHRUN: Launcher = {
  name: 'torchrun',
  rankName: TORCHRUN_NAMES.rank,
  place: (env) => placeFrom(env, TORCHRUN_NAMES),
  jobId: nothing,
  secret: nothing,
  masterHost: nothing,
}

/** `mpirun` of OpenMPI 4 and 5. */
const OPEN_MPI: Launcher = {
  name: "OpenMPI's mpirun",
  rankName: 'OMPI_COMM_WORLD_RANK',
  place: (env) =>
    placeFrom(env, {
      rank: 'OMPI_COMM_WORLD_RANK',
      worldSize: 'OMPI_COMM_WORLD_SIZE',
      localRank: 'OMPI_COMM_WORLD_LOCAL_RANK',
      localWorldSize: 'OMPI_COMM_WORLD_LOCAL_SIZE',
    }),
  jobId: (env) => openMpiKey(env) ?? env.PMIX_NAMESPACE ?? env.OMPI_MCA_ess_base_jobid,
  secret: openMpiKey,
  masterHost: nothing,
}

/** 128 random bits per launch, by which the ranks of one launch know each other on networks without another key. */
function openMpiKey(env: Environment): string | undefined {
  return env.OMPI_MCA_orte_precondition_transports
}

/** `mpiexec` of MPICH and its relatives (Hydra). */
const MPICH: Launcher = {
  name: "MPICH's mpiexec",
  rankName: 'PMI_RANK',
  place: (env) =>
    placeFrom(env, {
      rank: 'PMI_RANK',
      worldSize: 'PMI_SIZE',
      localRank: 'MPI_LOCALRANKID',
      localWorldSize: 'MPI_LOCALNRANKS',
    }),
  jobId: hydraJobId,
  secret: nothing,
  masterHost: nothing,
}

/** Hydra tells no name of the job, but all ranks of a machine inherit one socket from it, with one inode. */
function hydraJobId(env: Environment): string | undefined {
  if (!/^\d+$/.test(env.HYDI_CONTROL_FD ?? '')) return undefined
  try {
    const target = readlinkSync(`/proc/self/fd/${env.HYDI_CONTROL_FD}`)
    return target.startsWith('socket:') ? target : undefined
  } catch {
    return undefined
  }
}

/** `srun`. A batch script itself, outside `srun`, is no rank: it has SLURM_PROCID 0, but no SLURM_STEP_ID. */
const SLURM: Launcher = {
  name: 'srun',
  rankName: 'SLURM_PROCID',
  place: (env) => {
    const worldSizeName = env.SLURM_STEP_NUM_TASKS === undefined ? 'SLURM_NTASKS' : 'SLURM_STEP_NUM_TASKS'
    const worldSize = integer(env, worldSizeName, 1, Number.MAX_SAFE_INTEGER)
    const rank = integer(env, 'SLURM_PROCID', 0, worldSize - 1, `${worldSizeName} - 1`)
    const localWorldSize = slurmLocalSize(env, worldSize)
    return { rank, worldSize, localWorldSize, localRank: integer(env, 'SLURM_LOCALID', 0, localWorldSize - 1) }
  },
  jobId: (env) => (env.SLURM_JOB_ID === undefined ? undefined : `${env.SLURM_JOB_ID}.${env.SLURM_STEP_ID}`),
  secret: nothing,
  masterHost: (env) => {
    const name = env.SLURM_STEP_NODELIST === undefined ? 'SLURM_JOB_NODELIST' : 'SLURM_STEP_NODELIST'
    const text = env[name]
    if (text === undefined) return undefined
    const [first] = expandHostList(text) ?? []
    if (first === undefined) throw invalid(name, text, `${name} is a list of hosts, such as node[01-04,7]`)
    return first
  },
}

function slurmLocalSize(env: Environment, worldSize: number): number {
  const name = env.SLURM_STEP_TASKS_PER_NODE === undefined ? 'SLURM_TASKS_PER_NODE' : 'SLURM_STEP_TASKS_PER_NODE'
  const text = env[name]
  if (text === undefined) throw invalid(name, text, `${name} is set when SLURM_PROCID is set`)
  const counts = expandTaskCounts(text)
  if (counts?.reduce((sum, count) => sum + count, 0) !== worldSize) {
    throw invalid(name, text, `${name} lists the tasks of each node, such as 2(x3),1; together ${worldSize}`)
  }
  const node = integer(env, 'SLURM_NODEID', 0, counts.length - 1)
  return counts[node] as number
}

/**
 * Who started this process: the launcher that is nearest to it. torchrun's variables come first, because torchrun and
 * `rankwise run` are themselves started by the others; then those of MPI, because srun starts mpirun's daemons.
 *
 * @returns undefined when no launcher did
 * @throws RankwiseError `RENDEZVOUS_ENV` when two launchers that cannot contain each other name different ranks
 */
export function findLauncher(env: Environment): Launcher | undefined {
  const mpi = [OPEN_MPI, ...(isHydra(env) ? [MPICH] : [])].filter(({ rankName }) => env[rankName] !== undefined)
  const isSlurm = env.SLURM_PROCID !== undefined && env.SLURM_STEP_ID !== undefined
  if (env.RANK !== undefined) {
    // What torchrun has started is one of its ranks, whatever has started torchrun.
    if (env.TORCHELASTIC_RUN_ID === undefined) requireAgreement(env, [TORCHRUN, ...mpi])
    return TORCHRUN
  }
  requireAgreement(env, mpi)
  return mpi[0] ?? (isSlurm ? SLURM : undefined) ?? (hasTorchrunNames(env) ? TORCHRUN : undefined)
}

/** srun sets PMI_RANK, too, but not where on its machine the rank is; its own variables tell it. */
function isHydra(env: Environment): boolean {
  return env.MPI_LOCALRANKID !== undefined || env.SLURM_PROCID === undefined
}

/** A stray LOCAL_RANK or MASTER_ADDR says that somebody meant to start ranks. */
function hasTorchrunNames(env: Environment): boolean {
  const names = [...Object.values(TORCHRUN_NAMES), 'MASTER_ADDR', 'MASTER_PORT']
  return names.some((name) => env[name] !== undefined)
}

function requireAgreement(env: Environment, launchers: readonly Launcher[]): void {
  const [first, ...others] = launchers.map((launcher) => ({ launcher, place: launcher.place(env) }))
  for (const { launcher, place } of others) {
    if (first === undefined || (place.rank === first.place.rank && place.worldSize === first.place.worldSize)) continue
    throw new RankwiseError('RENDEZVOUS_ENV', 'two launchers say that this process is another rank', {
      where: `environment variables ${first.launcher.rankName} and ${launcher.rankName}`,
      actual: {
        [first.launcher.rankName]: `${first.place.rank} of ${first.place.worldSize}`,
        [launcher.rankName]: `${place.rank} of ${place.worldSize}`,
      },
      rule: 'a process is one rank of one group',
      remedy: `unset the variables of the launcher that did not start the ranks`,
    })
  }
}

function placeFrom(env: Environment, names: Names): Place {
  const required = [names.rank, names.worldSize]
  const local = [names.localRank, names.localWorldSize]
  for (const name of required) requireVariable(env, name, [...required, ...local, 'MASTER_ADDR', 'MASTER_PORT'])
  const worldSize = integer(env, names.worldSize, 1, Number.MAX_SAFE_INTEGER)
  const rank = integer(env, names.rank, 0, worldSize - 1, `${names.worldSize} - 1`)
  if (local.every((name) => env[name] === undefined))
    return { rank, worldSize, localRank: rank, localWorldSize: worldSize }
  for (const name of local) requireVariable(env, name, [...required, ...local])
  const localWorldSize = integer(env, names.localWorldSize, 1, worldSize, names.worldSize)
  const localRank = integer(env, names.localRank, 0, localWorldSize - 1, `${names.localWorldSize} - 1`)
  if (localRank > rank) {
    throw invalid(names.localRank, env[names.localRank], `${names.localRank} is at most ${names.rank} (${rank})`)
  }
  return { rank, worldSize, localRank, localWorldSize }
}

/** @param family variables that are only set together with this one */
export function requireVariable(env: Environment, name: string, family: readonly string[]): void {
  if (env[name] !== undefined) return
  const present = family.filter((other) => env[other] !== undefined)
  throw invalid(name, undefined, `${name} is set when ${present.join(', ')} ${present.length > 1 ? 'are' : 'is'} set`)
}

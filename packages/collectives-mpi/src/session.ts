import { RankwiseError } from '@rankwise/core'
import { startedByOpenMpi } from './library.ts'
import type { Machines } from './machines.ts'
import { MAX_MACHINES } from './mailbox.ts'
import type { MpiGroupState } from './mpi-group-state.ts'
import { MpiProcess, PMI_DESCRIPTOR } from './mpi-process.ts'
import { PmiServer } from './pmi-server.ts'

/** UCX, over which MPICH talks, would patch malloc, which ends Node at its first garbage collection. */
const UCX_SETTINGS = { UCX_MEM_EVENTS: 'n' }
/** Leaders never share a machine: OpenMPI needs no shared memory, which a killed process would leave behind. */
const OPENMPI_SETTINGS = { OMPI_MCA_btl: '^vader', UCX_MEM_EVENTS: 'n' }

let joinedOpenMpi = false

/** The part of this rank in MPI. */
export class MpiSession {
  readonly process: MpiProcess
  /** MPI's number of the leader of each machine. */
  readonly leaders: readonly number[]

  private constructor(process: MpiProcess, leaders: readonly number[]) {
    this.process = process
    this.leaders = leaders
  }

  /**
   * Joins MPI. OpenMPI knows all ranks that its mpirun has started, and all have to come; MPICH knows the leaders only,
   * and learns of them from a PMI server in each of them.
   *
   * @param dataBytes memory that the leader needs for data
   * @returns undefined on a rank that needs no MPI
   * @throws RankwiseError `MPI_NOT_FOUND`, `MPI_UNSUPPORTED`, `MPI_FAILED`, `MPI_WORLD`, `MPI_JOINED`, `MPI_MACHINES`
   */
  static async join(
    machines: Machines,
    rank: number,
    state: MpiGroupState,
    dataBytes: number,
  ): Promise<MpiSession | undefined> {
    const everyRank = startedByOpenMpi()
    const isLeader = machines.ownRanks[0] === rank
    if (machines.count === 1 || !(everyRank || isLeader)) return undefined
    requireJoinable(machines, everyRank)
    const started = await MpiProcess.start({
      dataBytes: isLeader ? dataBytes : 0,
      env: unlessSet(everyRank ? OPENMPI_SETTINGS : { ...UCX_SETTINGS, ...pmiVariables(machines) }),
      onFailure: (error) => state.mpiFailed(error),
      requireRunning: () => state.requireRunning(),
    })
    try {
      if (!everyRank) servePmi(started, machines, state)
      const world = await started.ready()
      requireWorld(world, everyRank ? machines.worldSize : machines.count, everyRank ? rank : machines.own)
    } catch (error) {
      await started.kill()
      throw error
    }
    const leaders = machines.ranks.map(([leader], machine) => (everyRank ? (leader as number) : machine))
    return new MpiSession(started, leaders)
  }

  /** Waits until all ranks have left and then ends MPI; at once if a rank is lost. */
  async leave(state: MpiGroupState, healthy: boolean): Promise<void> {
    if (healthy && (await state.allLeft())) await this.process.finalize()
    await this.process.kill()
  }
}

/** Variables with which MPICH finds a PMI-1 server; those of another one would come first or beside them. */
function pmiVariables(machines: Machines): Record<string, string> {
  return { PMI_FD: String(PMI_DESCRIPTOR), PMI_RANK: String(machines.own), PMI_SIZE: String(machines.count) }
}

function servePmi(started: MpiProcess, machines: Machines, state: MpiGroupState): PmiServer {
  return new PmiServer(started.pmi, {
    size: machines.count,
    exchange: (round, puts) => state.exchange(round, [...puts]),
    onFailure: (cause) => state.mpiFailed(new RankwiseError('MPI_FAILED', cause.message, { cause })),
  })
}

/** What a user sets for UCX or OpenMPI counts. */
function unlessSet(settings: Readonly<Record<string, string>>): Record<string, string> {
  const isOurs = (name: string) => name.startsWith('PMI_') || process.env[name] === undefined
  return Object.fromEntries(Object.entries(settings).filter(([name]) => isOurs(name)))
}

function requireJoinable(machines: Machines, everyRank: boolean): void {
  if (machines.count > MAX_MACHINES) {
    throw new RankwiseError('MPI_MACHINES', 'there are too many machines', {
      actual: { machines: machines.count },
      rule: `ranks are on at most ${MAX_MACHINES} machines`,
    })
  }
  if (!everyRank) return
  if (joinedOpenMpi) {
    throw new RankwiseError('MPI_JOINED', 'this rank has taken part in MPI before', {
      rule: 'what mpirun of OpenMPI has started joins MPI once',
      remedy: 'keep one process group until the end, or use MPICH',
    })
  }
  joinedOpenMpi = true
}

function requireWorld(
  { rank, size, version }: { readonly rank: number; readonly size: number; readonly version: string },
  expectedSize: number,
  expectedRank: number,
): void {
  if (size === expectedSize && rank === expectedRank) return
  throw new RankwiseError('MPI_WORLD', 'MPI numbers the processes otherwise than the environment does', {
    actual: { library: version, 'MPI rank': rank, 'MPI size': size, expectedRank, expectedSize },
    rule: 'RANK and WORLD_SIZE are those of MPI_COMM_WORLD',
    remedy: 'start all ranks with one mpirun, and leave RANK and WORLD_SIZE unset',
  })
}

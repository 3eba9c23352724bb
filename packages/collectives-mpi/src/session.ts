import { Socket } from 'node:net'
import { setTimeout } from 'node:timers/promises'
import { RankwiseError } from '@rankwise/core'
import type { GroupState } from './group-state.ts'
import { startedByOpenMpi } from './library.ts'
import type { Machines } from './machines.ts'
import { Mpi } from './mpi.ts'
import { exitWithoutThreads, socketPair } from './native.ts'
import { PmiServer } from './pmi-server.ts'

/**
 * UCX, over which MPICH talks, would otherwise patch malloc, which ends Node at its first garbage collection, and take
 * over signals that V8 uses.
 */
const UCX_SETTINGS = { UCX_MEM_EVENTS: 'n', UCX_HANDLE_ERRORS: 'none' }
/** Leaders never share a machine: OpenMPI needs no shared memory, which a killed process would leave behind. */
const OPENMPI_SETTINGS = { OMPI_MCA_btl: '^vader' }

const PROGRESS_MS = 2
/** All ranks have left when MPI_Finalize is called; only a rank that dies in just that moment holds it up. */
const FINALIZE_MS = 10_000

let joined = false

/** MPI, as this process takes part in it. It can do so once. */
export class MpiSession {
  readonly mpi: Mpi
  /** MPI's number of the leader of each machine. */
  readonly leaders: readonly number[]
  readonly #server: PmiServer | undefined

  private constructor(mpi: Mpi, leaders: readonly number[], server: PmiServer | undefined) {
    this.mpi = mpi
    this.leaders = leaders
    this.#server = server
  }

  /**
   * Joins MPI. OpenMPI knows all ranks that its mpirun has started; MPICH knows the leaders only, and learns of them from
   * a PMI server in this process.
   *
   * @returns undefined on a rank that needs no MPI
   * @throws RankwiseError `MPI_NOT_FOUND`, `MPI_UNSUPPORTED`, `MPI_STACK`, `MPI_FAILED`, `MPI_WORLD`, `MPI_JOINED`
   */
  static async join(machines: Machines, rank: number, state: GroupState): Promise<MpiSession | undefined> {
    const everyRank = startedByOpenMpi()
    const isLeader = machines.ownRanks[0] === rank
    if (!everyRank && !isLeader) return undefined
    if (joined) throw joinedBefore()
    // UCX reads its settings when it is loaded.
    setUnlessSet(everyRank ? OPENMPI_SETTINGS : UCX_SETTINGS)
    const mpi = Mpi.load()
    joined = true
    const leaders = machines.ranks.map(([leader], machine) => (everyRank ? (leader as number) : machine))
    const server = everyRank ? undefined : servePmi(machines, state)
    await initialize(mpi, state)
    requireWorld(mpi, everyRank ? machines.worldSize : machines.count, everyRank ? rank : machines.own)
    return new MpiSession(mpi, leaders, server)
  }

  /** Waits until all ranks have left and then ends MPI, which no process can do alone; not if a rank is lost. */
  async leave(state: GroupState): Promise<void> {
    // What has been sent may still be buffered here.
    const progress = setInterval(() => this.mpi.progress(), PROGRESS_MS)
    try {
      if (!(await state.allLeft())) return
    } finally {
      clearInterval(progress)
    }
    const ended = await Promise.race([
      this.mpi.finalize().then(() => true),
      setTimeout(FINALIZE_MS, false, { ref: false }),
    ])
    if (ended) this.#server?.close()
    else exitWithoutThreads()
  }
}

/** MPI_Init cannot be interrupted: when a rank is lost meanwhile, its thread stays behind. */
async function initialize(mpi: Mpi, state: GroupState): Promise<void> {
  const failed = state.failed()
  const first = await Promise.race([mpi.initialize().then(() => 'ready' as const), failed.promise])
  failed.cancel()
  if (first === 'ready') return
  exitWithoutThreads()
  throw new RankwiseError('RANK_LOST', 'the group failed while MPI was starting', { where: 'MPI_Init' })
}

function servePmi(machines: Machines, state: GroupState): PmiServer {
  const [served, given] = socketPair()
  Object.assign(process.env, {
    PMI_FD: String(given),
    PMI_RANK: String(machines.own),
    PMI_SIZE: String(machines.count),
  })
  for (const name of OTHER_PMI) delete process.env[name]
  const socket = new Socket({ fd: served, readable: true, writable: true })
  socket.unref()
  return new PmiServer(socket, {
    size: machines.count,
    exchange: (round, puts) => state.exchange(round, [...puts]),
    onFailure: (cause) => state.fail({ code: 'MPI_FAILED', what: cause.message, ranks: [], cause }),
  })
}

/** How a launcher offers its own PMI server. */
const OTHER_PMI = ['PMI_PORT', 'PMI_ID', 'PMI_SPAWNED']

/** The C library sees what is set here: Node passes it on. */
function setUnlessSet(settings: Readonly<Record<string, string>>): void {
  for (const [name, value] of Object.entries(settings)) process.env[name] ??= value
}

function requireWorld(mpi: Mpi, size: number, rank: number): void {
  if (mpi.size === size && mpi.rank === rank) return
  throw new RankwiseError('MPI_WORLD', 'MPI numbers the processes otherwise than the environment does', {
    actual: { 'MPI rank': mpi.rank, 'MPI size': mpi.size, 'expected rank': rank, 'expected size': size },
    rule: 'RANK and WORLD_SIZE are those of MPI_COMM_WORLD',
    remedy: 'start all ranks with one mpirun, and leave RANK and WORLD_SIZE unset',
  })
}

function joinedBefore(): RankwiseError {
  return new RankwiseError('MPI_JOINED', 'this process has taken part in MPI before', {
    rule: 'a process can join MPI once: MPI_Init after MPI_Finalize does not exist',
    remedy: 'keep one process group until the end, or start new processes',
  })
}

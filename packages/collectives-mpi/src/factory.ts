import { hostname } from 'node:os'
import { localCollectives } from '@rankwise/collectives-local'
import { loadReduce, Mesh } from '@rankwise/collectives-local/internals'
import {
  type Collectives,
  type EnvironmentRendezvous,
  openStore,
  PrefixStore,
  RankwiseError,
  type Store,
} from '@rankwise/core'
import { type Failure, failureError, requireKnownOptions } from '@rankwise/core/collectives'
import { exchangeCards, machineId, ownAddress } from './card.ts'
import { CACHE_LINE, CHUNK_BYTES, chunkMemory, chunkMemoryBytes } from './chunk-memory.ts'
import { endWhenUnacknowledged } from './end-when-unacknowledged.ts'
import { Leaders } from './leaders.ts'
import { type Card, Machines } from './machines.ts'
import { LEFT, MpiCollectives } from './mpi-collectives.ts'
import { MpiGroupState } from './mpi-group-state.ts'
import { MpiSession } from './session.ts'

/** Options of a group; the defaults suit most. */
export interface MpiCollectivesOptions {
  /**
   * Where the ranks find each other, if they have a store already; all ranks of the group give one, with keys for this
   * group alone. It is not closed. @default a store of their own, at the address of the rendezvous
   */
  readonly store?: Store
  /**
   * Bytes that go between the machines at a time; the same on all ranks. A multiple of 64 from `64 * worldSize` to
   * 4194304: MPI libraries are known to fail with messages that are much larger. @default 4194304
   */
  readonly chunkBytes?: number
}

const OPTIONS: readonly (keyof MpiCollectivesOptions)[] = ['store', 'chunkBytes']

/** Operations on a machine end before, by what the group as a whole decides. */
const LOCAL_TIMEOUT_EXTRA_MS = 5_000
const MAX_TIMEOUT_MS = 2 ** 31 - 1

/**
 * Joins ranks on several machines: those of one machine over shared memory, the machines over MPI. Ranks that turn out to
 * be on a single machine get the collectives of `@rankwise/collectives-local`, and need no MPI.
 *
 * @throws RankwiseError `COLLECTIVES_OPTIONS`, `MPI_NOT_FOUND`, `MPI_UNSUPPORTED`, `MPI_WORLD`, `MPI_JOINED`, `MPI_FAILED`,
 * `MPI_MACHINES`, `CHUNK_BYTES`, `RENDEZVOUS_TIMEOUT`, `RENDEZVOUS_ADDRESS`, `RANK_LOST`, and those of `localCollectives`
 */
export async function mpiCollectives(
  rendezvous: EnvironmentRendezvous,
  options: MpiCollectivesOptions = {},
): Promise<Collectives> {
  requireKnownOptions('mpi', options, OPTIONS)
  const { store: given, chunkBytes = CHUNK_BYTES } = options
  requireChunkBytes(chunkBytes, rendezvous.worldSize)
  if (rendezvous.worldSize === 1) return localCollectives(rendezvous)
  const store = given ?? (await openStore(rendezvous))
  // Nothing else keeps the process alive while it waits for other ranks.
  const alive = setInterval(() => {}, MAX_TIMEOUT_MS)
  try {
    return await join(rendezvous, store, chunkBytes)
  } finally {
    clearInterval(alive)
    // In the background: other ranks may still read from it.
    if (given === undefined) void store.close()
  }
}

async function join(rendezvous: EnvironmentRendezvous, store: Store, chunkBytes: number): Promise<Collectives> {
  const { rank, token = '', timeoutMs } = rendezvous
  const signal = AbortSignal.timeout(timeoutMs)
  const mesh = await Mesh.listen(await ownAddress(rendezvous), { rank, token, prepare: endWhenUnacknowledged })
  try {
    const card = cardOf(rendezvous, mesh, chunkBytes)
    const cards = await exchangeCards(store, card, rendezvous.worldSize, signal)
    const machines = new Machines(cards, rank)
    await mesh.connect(cards, signal)
    const state = new MpiGroupState(mesh, machines, rank, timeoutMs)
    state.listen()
    return await joinConnected({ rendezvous, store, machines, state, chunkBytes, signal })
  } catch (error) {
    await mesh.close()
    throw error
  }
}

interface Connected {
  readonly rendezvous: EnvironmentRendezvous
  readonly store: Store
  readonly machines: Machines
  readonly state: MpiGroupState
  readonly chunkBytes: number
  readonly signal: AbortSignal
}

/** From here on, ranks hear of a failure on another one at once. */
async function joinConnected(connected: Connected): Promise<Collectives> {
  const { rendezvous, store, machines, state, chunkBytes, signal } = connected
  const { rank } = rendezvous
  const onTimeout = () => state.notReady()
  signal.addEventListener('abort', onTimeout)
  let local: Collectives | undefined
  let session: MpiSession | undefined
  try {
    if (machines.count === 1) return await joinOneMachine(connected)
    local = await joinMachine(rendezvous, machines, store)
    session = await MpiSession.join(machines, rank, state, chunkMemoryBytes(machines, chunkBytes))
    await state.ready()
    const shared = machines.ownRanks[0] === rank ? session : undefined
    const leaders = shared && new Leaders(shared.process, machines.own, shared.leaders, await loadReduce())
    const memory = chunkMemory(machines, chunkBytes, shared && ((bytes) => shared.process.region(bytes)))
    return new MpiCollectives({ rank, machines, state, local, leaders, session, memory })
  } catch (error) {
    state.fail(couldNotJoin(rank, error))
    await state.close()
    await session?.process.kill()
    await local?.destroy()
    throw state.failure?.cause === error ? error : failureError(state.failure as Failure, 'rendezvous')
  } finally {
    signal.removeEventListener('abort', onTimeout)
  }
}

function cardOf(rendezvous: EnvironmentRendezvous, { place }: Mesh, chunkBytes: number): Card {
  const { localRank, localWorldSize } = rendezvous
  return {
    ...place,
    chunkBytes,
    localRank,
    localWorldSize,
    machine: machineId(),
    host: hostname(),
    pid: process.pid,
  }
}

function couldNotJoin(rank: number, cause: unknown): Failure {
  const [line = ''] = (cause instanceof Error ? cause.message : String(cause)).split('\n')
  const code = cause instanceof RankwiseError ? cause.code : 'RANK_LOST'
  return { code, what: `rank ${rank} could not join: ${line.replace(`[${code}] `, '')}`, ranks: [rank], cause }
}

/** The connections between the ranks are of no use where they share memory. */
async function joinOneMachine({ rendezvous, store, machines, state }: Connected): Promise<Collectives> {
  const local = await localCollectives(rendezvous, { store: storeOf(machines, store) })
  await state.ready()
  state.leave(0, LEFT)
  await state.close()
  return local
}

/** The group of the ranks of this machine. */
function joinMachine(rendezvous: EnvironmentRendezvous, machines: Machines, store: Store): Promise<Collectives> {
  const rank = machines.ownRanks.indexOf(rendezvous.rank)
  const worldSize = machines.ownRanks.length
  const timeoutMs = Math.min(rendezvous.timeoutMs + LOCAL_TIMEOUT_EXTRA_MS, MAX_TIMEOUT_MS)
  return localCollectives(
    { ...rendezvous, rank, localRank: rank, worldSize, localWorldSize: worldSize, timeoutMs },
    { store: storeOf(machines, store) },
  )
}

function storeOf(machines: Machines, store: Store): Store {
  return new PrefixStore(`machine/${machines.own}`, store)
}

function requireChunkBytes(chunkBytes: number, worldSize: number): void {
  const least = CACHE_LINE * worldSize
  if (chunkBytes >= least && chunkBytes % CACHE_LINE === 0 && chunkBytes <= CHUNK_BYTES) return
  throw new RankwiseError('CHUNK_BYTES', 'chunkBytes is out of range', {
    actual: { chunkBytes, worldSize },
    rule: `chunkBytes is a multiple of ${CACHE_LINE} from ${CACHE_LINE} * worldSize (${least}) to ${CHUNK_BYTES}`,
  })
}

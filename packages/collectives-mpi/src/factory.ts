import { once } from 'node:events'
import { type AddressInfo, createServer } from 'node:net'
import { hostname } from 'node:os'
import { localCollectives } from '@rankwise/collectives-local'
import { type Failure, failureError } from '@rankwise/collectives-local/internals'
import { type Collectives, type EnvironmentRendezvous, openStore, RankwiseError, type Store } from '@rankwise/core'
import { exchangeCards, machineId, ownAddress } from './card.ts'
import { chunkMemory, chunkMemoryBytes } from './chunk-memory.ts'
import { GroupState } from './group-state.ts'
import { Leaders } from './leaders.ts'
import { type Card, Machines } from './machines.ts'
import { Mesh } from './mesh.ts'
import { MpiCollectives } from './mpi-collectives.ts'
import { MpiSession } from './session.ts'

/** Options of a group; the defaults suit most. */
export interface MpiCollectivesOptions {
  /**
   * Where the ranks find each other, if they have a store already; all ranks of the group give one, with keys for this
   * group alone. It is not closed. @default a store of their own, at the address of the rendezvous
   */
  readonly store?: Store
}

/** Operations on a machine end before, by what the group as a whole decides. */
const LOCAL_TIMEOUT_EXTRA_MS = 5_000
const MAX_TIMEOUT_MS = 2 ** 31 - 1

/**
 * Joins ranks on several machines: those of one machine over shared memory, the machines over MPI. On a single machine
 * the group is the one of `@rankwise/collectives-local`, and no MPI is needed.
 *
 * @throws RankwiseError `MPI_NOT_FOUND`, `MPI_UNSUPPORTED`, `MPI_WORLD`, `MPI_JOINED`, `MPI_FAILED`,
 * `MPI_MACHINES`, `RENDEZVOUS_TIMEOUT`, `RENDEZVOUS_ADDRESS`, `RANK_LOST`, and those of `localCollectives`
 */
export async function mpiCollectives(
  rendezvous: EnvironmentRendezvous,
  { store: given }: MpiCollectivesOptions = {},
): Promise<Collectives> {
  if (rendezvous.worldSize === 1) return localCollectives(rendezvous)
  // Nothing else keeps the process alive while it waits for other ranks.
  const alive = setInterval(() => {}, MAX_TIMEOUT_MS)
  const store = given ?? (await openStore(rendezvous))
  try {
    return await join(rendezvous, store)
  } finally {
    clearInterval(alive)
    // In the background: other ranks may still read from it.
    if (given === undefined) void store.close()
  }
}

async function join(rendezvous: EnvironmentRendezvous, store: Store): Promise<Collectives> {
  const { rank, token = '', timeoutMs } = rendezvous
  const signal = AbortSignal.timeout(timeoutMs)
  const mesh = await Mesh.listen(await ownAddress(rendezvous), { rank, token })
  try {
    const cards = await exchangeCards(store, cardOf(rendezvous, mesh), rendezvous.worldSize, signal)
    const machines = new Machines(cards, rank)
    await mesh.connect(cards, signal)
    return await joinConnected(rendezvous, store, machines, new GroupState(mesh, machines, rank, timeoutMs), signal)
  } catch (error) {
    mesh.close()
    throw error
  }
}

/** From here on, ranks hear of a failure on another one at once. */
async function joinConnected(
  rendezvous: EnvironmentRendezvous,
  store: Store,
  machines: Machines,
  state: GroupState,
  signal: AbortSignal,
): Promise<Collectives> {
  const { rank } = rendezvous
  let local: Collectives | undefined
  let session: MpiSession | undefined
  try {
    local = await joinMachine(rendezvous, machines, store)
    session = await MpiSession.join(machines, rank, state, chunkMemoryBytes(machines))
    await state.ready(signal)
    const shared = machines.ownRanks[0] === rank ? session : undefined
    const leaders = shared && new Leaders(shared.process, machines.own, shared.leaders)
    const memory = chunkMemory(machines, shared && ((bytes) => shared.process.region(bytes)))
    return new MpiCollectives({ rank, machines, state, local, leaders, session, memory })
  } catch (error) {
    state.fail(couldNotJoin(rank, error))
    state.close()
    await session?.process.kill()
    await local?.destroy()
    throw state.failure?.cause === error ? error : failureError(state.failure as Failure, 'rendezvous')
  }
}

function cardOf({ rank, localRank, localWorldSize }: EnvironmentRendezvous, { address, port }: Mesh): Card {
  return {
    rank,
    localRank,
    localWorldSize,
    machine: machineId(),
    address,
    port,
    host: hostname(),
    pid: process.pid,
  }
}

function couldNotJoin(rank: number, cause: unknown): Failure {
  const [line = ''] = (cause instanceof Error ? cause.message : String(cause)).split('\n')
  const code = cause instanceof RankwiseError ? cause.code : 'RANK_LOST'
  return { code, what: `rank ${rank} could not join: ${line.replace(`[${code}] `, '')}`, ranks: [rank], cause }
}

/** The group of the ranks of this machine; its leader chooses where they meet. */
async function joinMachine(rendezvous: EnvironmentRendezvous, machines: Machines, store: Store): Promise<Collectives> {
  const index = machines.ownRanks.indexOf(rendezvous.rank)
  const worldSize = machines.ownRanks.length
  const key = `machine/${machines.own}`
  if (index === 0 && worldSize > 1) await store.set(key, Uint8Array.of(...portBytes(await freePort())))
  const [high = 0, low = 0] = worldSize > 1 ? await store.get(key) : []
  return localCollectives({
    ...rendezvous,
    rank: index,
    localRank: index,
    worldSize,
    localWorldSize: worldSize,
    masterAddr: LOOPBACK,
    masterPort: high * 256 + low,
    timeoutMs: Math.min(rendezvous.timeoutMs + LOCAL_TIMEOUT_EXTRA_MS, MAX_TIMEOUT_MS),
  })
}

const LOOPBACK = '127.0.0.1'

function portBytes(port: number): [number, number] {
  return [port >> 8, port & 255]
}

async function freePort(): Promise<number> {
  const server = createServer().listen(0, LOOPBACK)
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  server.close()
  await once(server, 'close')
  return port
}

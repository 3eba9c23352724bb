import { once } from 'node:events'
import { type AddressInfo, createServer } from 'node:net'
import { hostname } from 'node:os'
import { localCollectives } from '@rankwise/collectives-local'
import { type Collectives, type EnvironmentRendezvous, RankwiseError, type Store } from '@rankwise/core'
import { exchangeCards, machineId, ownAddress } from './card.ts'
import { GroupState } from './group-state.ts'
import { Leaders } from './leaders.ts'
import { Machines } from './machines.ts'
import { Mesh } from './mesh.ts'
import { MpiCollectives } from './mpi-collectives.ts'
import { MpiSession } from './session.ts'
import { Transfers } from './transfers.ts'

/** Options of a group; the defaults suit most. */
export interface MpiCollectivesOptions {
  /** Where the ranks find each other; it is not closed. */
  readonly store: Store
}

/** Operations on a machine end before, by what the group as a whole decides. */
const LOCAL_TIMEOUT_EXTRA_MS = 5_000
const MAX_TIMEOUT_MS = 2 ** 31 - 1
const FOREVER_MS = 2 ** 30

let groups = 0

/**
 * Joins ranks on several machines: those of one machine over shared memory, the machines over MPI. On a single machine
 * the group is the one of `@rankwise/collectives-local`, and no MPI is needed.
 *
 * @throws RankwiseError `MPI_NOT_FOUND`, `MPI_UNSUPPORTED`, `MPI_WORLD`, `MPI_JOINED`, `MPI_STACK`, `MPI_FAILED`,
 * `MPI_MACHINES`, `RENDEZVOUS_TIMEOUT`, `RENDEZVOUS_ADDRESS`, `RANK_LOST`, and those of `localCollectives`
 */
export async function mpiCollectives(
  rendezvous: EnvironmentRendezvous,
  { store }: MpiCollectivesOptions,
): Promise<Collectives> {
  if (rendezvous.worldSize === 1) return localCollectives(rendezvous)
  const group = `mpi/${groups++}`
  // Nothing else keeps the process alive while it waits for other ranks.
  const alive = setInterval(() => {}, FOREVER_MS)
  const { rank, token = '' } = rendezvous
  let mesh: Mesh | undefined
  try {
    mesh = await Mesh.listen(await ownAddress(rendezvous), { rank, group, token })
    return await join(rendezvous, store, group, mesh)
  } catch (error) {
    mesh?.close()
    throw error
  } finally {
    clearInterval(alive)
  }
}

async function join(rendezvous: EnvironmentRendezvous, store: Store, group: string, mesh: Mesh): Promise<Collectives> {
  const { rank, localRank, localWorldSize, worldSize, timeoutMs } = rendezvous
  const signal = AbortSignal.timeout(timeoutMs)
  const card = {
    rank,
    localRank,
    localWorldSize,
    machine: machineId(),
    address: mesh.address,
    port: mesh.port,
    host: hostname(),
    pid: process.pid,
  }
  const cards = await exchangeCards(store, group, card, worldSize, signal)
  const machines = new Machines(cards, rank)
  await mesh.connect(cards, signal)
  const state = new GroupState(mesh, machines, rank, timeoutMs)
  try {
    const local = await joinMachine(rendezvous, machines, store, group)
    const session = machines.count > 1 ? await MpiSession.join(machines, rank, state) : undefined
    await state.ready(signal)
    const leaders = leadersOf(machines, rank, session, state)
    return new MpiCollectives({ rank, machines, state, local, leaders, session })
  } catch (error) {
    const text = error instanceof RankwiseError ? error.message.split('\n')[0]?.replace(/^\[\w+\] /, '') : String(error)
    const code = error instanceof RankwiseError ? error.code : 'RANK_LOST'
    state.fail({ code, what: `rank ${rank} could not join: ${text}`, ranks: [rank], cause: error })
    state.close()
    throw error
  }
}

/** The group of the ranks of this machine; its leader chooses where they meet. */
async function joinMachine(
  rendezvous: EnvironmentRendezvous,
  machines: Machines,
  store: Store,
  group: string,
): Promise<Collectives> {
  const index = machines.ownRanks.indexOf(rendezvous.rank)
  const worldSize = machines.ownRanks.length
  const key = `${group}/machine/${machines.own}`
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

function leadersOf(
  machines: Machines,
  rank: number,
  session: MpiSession | undefined,
  state: GroupState,
): Leaders | undefined {
  if (session === undefined || machines.ownRanks[0] !== rank) return undefined
  const transfers = new Transfers(session.mpi, () => state.requireRunning())
  return new Leaders(transfers, machines.own, session.leaders)
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

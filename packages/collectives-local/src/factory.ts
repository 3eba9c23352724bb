import { randomBytes } from 'node:crypto'
import { setTimeout } from 'node:timers/promises'
import { type EnvironmentRendezvous, openStore, RankwiseError, type Store, throwIfAborted } from '@rankwise/core'
import { requireKnownOptions } from '@rankwise/core/collectives'
import { Arena, type ArenaLocation, newNonce } from './arena.ts'
import { connectRanks } from './connect-ranks.ts'
import { type Agreement, hostGroup, joinGroup } from './join.ts'
import { type Kernel, type KernelName, loadKernel, reductionFor } from './kernel.ts'
import { LocalCollectives } from './local-collectives.ts'
import type { LocalGroup } from './local-group.ts'
import { Meeting } from './meeting.ts'
import type { Native } from './native.ts'
import { ShmTransport } from './shm-transport.ts'
import { SingleRankCollectives } from './single-rank-collectives.ts'
import type { TransportChoice } from './transport.ts'
import { type Ability, findAbility } from './transport-choice.ts'

/** Options of a group; the defaults suit most. */
export interface LocalCollectivesOptions {
  /**
   * Bytes of a tensor that are exchanged at a time; rank 0 decides for all. In shared memory, the group takes
   * two slots of two ranks, or two per rank of more, at once; over TCP, each rank takes as much per other rank, when it is
   * needed. A multiple of 64 from `64 * worldSize` to 2^28. @default 1048576
   */
  readonly slotBytes?: number
  /**
   * Where the ranks meet, if they have a store already; all ranks of the group give one, with keys for this group alone.
   * It is not closed. @default a store of their own, at the address of the rendezvous
   */
  readonly store?: Store
  /**
   * What reduces: `native`, compiled C; `wasm`, WebAssembly with SIMD; `js`; or the first of them that works here. The
   * results are the same, bit for bit. A kernel that is asked for by name is used or refused. @default 'auto'
   */
  readonly kernel?: KernelName | 'auto'
  /**
   * What carries tensors: `shm`, memory that the ranks share; `tcp`, connections over the loopback; or `auto`, shared memory
   * where every rank has it. The results are the same, bit for bit. A transport that is asked for by name is used or
   * refused, and then by all ranks; `auto` on one rank goes with what the others ask for.
   * @default the environment variable RANKWISE_TRANSPORT, or 'auto'
   */
  readonly transport?: TransportChoice
  /** Gives up joining. */
  readonly signal?: AbortSignal | undefined
}

const OPTIONS: readonly (keyof LocalCollectivesOptions)[] = ['slotBytes', 'store', 'kernel', 'transport', 'signal']
const TRANSPORT_VARIABLE = 'RANKWISE_TRANSPORT'

/** Nobody guesses 256 random bits. */
const SECRET_BYTES = 32

/** Slots have at least a cache line for each rank. */
const CACHE_LINE = 64

/**
 * Larger slots need fewer meetings, which are slow when other processes want the cores. Measured with 2 ranks, native: on
 * 2 busy cores, 16 MiB take 28 ms in slots of 256 KiB, 13 ms in 1 MiB, 8 ms in 2 and 4 MiB. Slots that fit the caches of the
 * cores are faster on quiet ones: 2.5 ms in 1 MiB, 4.2 ms in 4 MiB.
 */
const SLOT_BYTES = 2 ** 20
const MAX_SLOT_BYTES = 2 ** 20

/** How long a rank that failed waits for the others to read why. They take milliseconds. */
const FAREWELL_MS = 500

/**
 * Joins ranks of one machine, over shared memory or TCP. Groups of one rank work on every platform and open nothing.
 *
 * @throws RankwiseError `TRANSPORT_UNSUPPORTED` and `SHARED_MEMORY` when ranks cannot share memory and `shm` was asked for,
 * `TRANSPORT_UNKNOWN`, `KERNEL_UNAVAILABLE`, `KERNEL_UNKNOWN`, `SLOT_BYTES`, `COLLECTIVES_OPTIONS`, `RENDEZVOUS_TIMEOUT`, `RENDEZVOUS_ADDRESS`, `RENDEZVOUS_REFUSED` or
 * `RANK_LOST` when the ranks do not find each other, `ABORTED`
 */
export async function localCollectives(
  rendezvous: EnvironmentRendezvous,
  options: LocalCollectivesOptions = {},
): Promise<LocalGroup> {
  requireKnownOptions('local', options, OPTIONS)
  const { slotBytes = SLOT_BYTES, kernel: kernelChoice = 'auto', store: given, signal } = options
  const { worldSize, localWorldSize } = rendezvous
  throwIfAborted(signal, 'localCollectives')
  const choice = options.transport ?? (process.env[TRANSPORT_VARIABLE] as TransportChoice | undefined) ?? 'auto'
  const [kernel, { ability, native }] = await Promise.all([loadKernel(kernelChoice), findAbility(choice)])
  if (worldSize === 1) return new SingleRankCollectives(kernel.name)
  if (localWorldSize !== worldSize) throw severalMachines(worldSize, localWorldSize)
  requireSlotBytes(slotBytes, worldSize)

  const plan: Plan = { rendezvous, ability, native, kernel, kernelChoice, slotBytes, signal }
  if (given !== undefined) return join(given, plan)
  const store = await openStore(rendezvous, { signal })
  try {
    const group = await join(store, plan)
    await store.close()
    return group
  } catch (error) {
    // The others still read what went wrong; one that is stopped does not hold this rank up for long.
    await Promise.race([store.close(), setTimeout(FAREWELL_MS, undefined, { ref: false })])
    throw error
  }
}

interface Plan {
  readonly rendezvous: EnvironmentRendezvous
  readonly ability: Ability
  readonly native: Native | undefined
  readonly kernel: Kernel
  readonly kernelChoice: KernelName | 'auto'
  readonly slotBytes: number
  readonly signal: AbortSignal | undefined
}

async function join(store: Store, plan: Plan): Promise<LocalGroup> {
  const { rendezvous, native, kernel, signal } = plan
  const { rank, timeoutMs } = rendezvous
  using meeting = new Meeting(store, timeoutMs, signal)
  const agreement = await agree(meeting, plan)
  const { arena, members, reason: transportReason } = agreement
  if (native !== undefined && arena !== undefined) {
    arena.close()
    const group = { native, kernel, members, rank, timeoutMs, label: '' }
    return new LocalCollectives({ rank, kernel: kernel.name, transportReason }, new ShmTransport(group, arena))
  }
  const { reduce, name } = await reductionFor(kernel, plan.kernelChoice, members.length)
  const transport = await connectRanks(meeting, rendezvous, agreement, reduce)
  return new LocalCollectives({ rank, kernel: name, transportReason }, transport)
}

function agree(meeting: Meeting, { rendezvous, ability, native, slotBytes }: Plan): Promise<Agreement> {
  const { rank, worldSize } = rendezvous
  if (rank > 0) {
    const open = native && ((location: ArenaLocation) => Arena.open(native, location))
    return joinGroup(meeting, rendezvous, { ability, open })
  }
  const create = native && (() => createArena(native, worldSize, slotBytes))
  const secret = randomBytes(SECRET_BYTES).toString('hex')
  return hostGroup(meeting, rendezvous, { ability, create, secret, slotBytes })
}

function createArena(native: Native, worldSize: number, slotBytes: number) {
  const nonce = newNonce()
  const arena = Arena.create(native, worldSize, slotBytes, nonce)
  return { arena, location: arena.location(nonce) }
}

function requireSlotBytes(slotBytes: number, worldSize: number): void {
  const least = CACHE_LINE * worldSize
  if (slotBytes >= least && slotBytes % CACHE_LINE === 0 && slotBytes <= MAX_SLOT_BYTES) return
  throw new RankwiseError('SLOT_BYTES', 'slotBytes is out of range', {
    actual: { slotBytes, worldSize },
    rule: `slotBytes is a multiple of ${CACHE_LINE} from ${CACHE_LINE} * worldSize (${least}) to ${MAX_SLOT_BYTES}`,
  })
}

function severalMachines(worldSize: number, localWorldSize: number): RankwiseError {
  return new RankwiseError('TRANSPORT_UNSUPPORTED', "'local' collectives reach the ranks of one machine only", {
    actual: { WORLD_SIZE: worldSize, LOCAL_WORLD_SIZE: localWorldSize },
    rule: 'LOCAL_WORLD_SIZE equals WORLD_SIZE',
    remedy: 'start all ranks on one machine',
  })
}

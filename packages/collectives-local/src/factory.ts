import { setTimeout } from 'node:timers/promises'
import {
  type EnvironmentRendezvous,
  openStore,
  type ProcessState,
  processState,
  RankwiseError,
  type Store,
} from '@rankwise/core'
import { Arena, newNonce } from './arena.ts'
import type { Member } from './failure-detector.ts'
import { hostGroup, joinGroup } from './join.ts'
import { type KernelName, loadKernel } from './kernel.ts'
import { LocalCollectives } from './local-collectives.ts'
import type { LocalGroup } from './local-group.ts'
import { loadNative, type Native } from './native.ts'
import { SingleRankCollectives } from './single-rank-collectives.ts'

/** Options of a group; the defaults suit most. */
export interface LocalCollectivesOptions {
  /**
   * Bytes of a tensor that are exchanged at a time; rank 0 decides for all. The group takes
   * two slots of two ranks, or two per rank of more, at once. A multiple of 64 from `64 * worldSize` to 2^28. @default 1048576
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
}

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
 * Joins ranks of one machine over shared memory. Groups of one rank work on every platform and open nothing.
 *
 * @throws RankwiseError `TRANSPORT_UNSUPPORTED` when ranks cannot share memory here, `SHARED_MEMORY` when the system
 * refuses it or is short of memory, `KERNEL_UNAVAILABLE`, `KERNEL_UNKNOWN`, `SLOT_BYTES`, `RENDEZVOUS_TIMEOUT`, `RENDEZVOUS_ADDRESS`, `RENDEZVOUS_REFUSED` or `RANK_LOST` when the ranks do not
 * find each other
 */
export async function localCollectives(
  rendezvous: EnvironmentRendezvous,
  { slotBytes = SLOT_BYTES, kernel: choice = 'auto', store }: LocalCollectivesOptions = {},
): Promise<LocalGroup> {
  const { rank, worldSize, localWorldSize, timeoutMs } = rendezvous
  const kernel = await loadKernel(choice)
  if (worldSize === 1) return new SingleRankCollectives(kernel.name)
  if (localWorldSize !== worldSize) throw severalMachines(worldSize, localWorldSize)
  requireSlotBytes(slotBytes, worldSize)

  const native = await loadNative()
  const { arena, members } = await meet(native, rendezvous, slotBytes, store)
  return new LocalCollectives({ native, kernel, members, rank, timeoutMs, label: '' }, arena)
}

async function meet(native: Native, rendezvous: EnvironmentRendezvous, slotBytes: number, given: Store | undefined) {
  const join = (store: Store) =>
    rendezvous.rank === 0
      ? host(native, store, rendezvous, slotBytes)
      : joinGroup(store, rendezvous, self(rendezvous.rank), (location) => Arena.open(native, location))
  if (given !== undefined) return join(given)

  const store = await openStore(rendezvous)
  try {
    const joined = await join(store)
    await store.close()
    return joined
  } catch (error) {
    // The others still read what went wrong; one that is stopped does not hold this rank up for long.
    await Promise.race([store.close(), setTimeout(FAREWELL_MS, undefined, { ref: false })])
    throw error
  }
}

async function host(native: Native, store: Store, rendezvous: EnvironmentRendezvous, slotBytes: number) {
  const nonce = newNonce()
  const arena = Arena.create(native, rendezvous.worldSize, slotBytes, nonce)
  try {
    const members = await hostGroup(store, rendezvous, self(0), arena.location(nonce))
    arena.close()
    return { arena, members }
  } catch (error) {
    arena.destroy()
    throw error
  }
}

function self(rank: number): Member {
  const { startTime } = processState(process.pid) as ProcessState
  return { rank, pid: process.pid, startTime }
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

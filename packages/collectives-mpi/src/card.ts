import { createSocket } from 'node:dgram'
import { lookup } from 'node:dns/promises'
import { once } from 'node:events'
import { readFileSync, readlinkSync } from 'node:fs'
import { isIPv6 } from 'node:net'
import { hostname } from 'node:os'
import { RankwiseError, type Rendezvous, type Store } from '@rankwise/core'
import { nameRanks } from '@rankwise/core/collectives'
import type { Card } from './machines.ts'

/**
 * The address at which other machines reach this process: the one from which it reaches MASTER_ADDR itself.
 *
 * @throws RankwiseError `RENDEZVOUS_ADDRESS`
 */
export async function ownAddress({ masterAddr, masterPort }: Rendezvous): Promise<string> {
  const socket = createSocket(await familyOf(masterAddr))
  try {
    // Connecting a datagram socket sends nothing; the kernel only chooses the route.
    socket.connect(masterPort, masterAddr)
    await once(socket, 'connect')
    return socket.address().address
  } catch (cause) {
    throw unroutable(masterAddr, cause)
  } finally {
    socket.close()
  }
}

async function familyOf(address: string): Promise<'udp4' | 'udp6'> {
  try {
    return isIPv6((await lookup(address)).address) ? 'udp6' : 'udp4'
  } catch (cause) {
    throw unroutable(address, cause)
  }
}

/** Equal for processes that see each other in /proc of one kernel, and so can share memory. */
export function machineId(): string {
  try {
    return `${readFileSync('/proc/sys/kernel/random/boot_id', 'latin1').trim()} ${readlinkSync('/proc/self/ns/pid')}`
  } catch {
    return hostname()
  }
}

/**
 * Hands out the card of this rank and collects those of all, in rank order.
 *
 * @throws RankwiseError `RENDEZVOUS_TIMEOUT`, and what the store throws
 */
export async function exchangeCards(store: Store, card: Card, worldSize: number, signal: AbortSignal): Promise<Card[]> {
  const key = (rank: number) => `rank/${rank}`
  await store.set(key(card.rank), new TextEncoder().encode(JSON.stringify(card)))
  const cards: (Card | undefined)[] = Array(worldSize).fill(undefined)
  const reads = cards.map(async (_, rank) => {
    cards[rank] = JSON.parse(new TextDecoder().decode(await store.get(key(rank), { signal }))) as Card
  })
  try {
    await Promise.all(reads)
  } catch (cause) {
    await Promise.allSettled(reads)
    throw signal.aborted ? notCome(cards, cause) : cause
  }
  return cards as Card[]
}

function notCome(cards: readonly (Card | undefined)[], cause: unknown): RankwiseError {
  const missing = cards.flatMap((card, rank) => (card === undefined ? [rank] : []))
  return new RankwiseError('RENDEZVOUS_TIMEOUT', `${nameRanks(missing)} did not join the group in time`, {
    where: 'rendezvous',
    actual: { ranks: missing, worldSize: cards.length },
    rule: 'every rank joins within timeoutMs',
    remedy: 'check that every rank was started, with the same WORLD_SIZE, MASTER_ADDR, MASTER_PORT and RANKWISE_TOKEN',
    cause,
  })
}

function unroutable(address: string, cause: unknown): RankwiseError {
  return new RankwiseError('RENDEZVOUS_ADDRESS', 'there is no way to this address', {
    where: address,
    actual: { reason: (cause as NodeJS.ErrnoException).code },
    rule: 'MASTER_ADDR is an address of rank 0 that every machine can reach',
    cause,
  })
}

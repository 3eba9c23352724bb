import type { PeerAddress } from '@rankwise/collectives-local/internals'
import { RankwiseError } from '@rankwise/core'

/** What a rank says of itself before the ranks talk to each other. */
export interface Card extends PeerAddress {
  readonly localRank: number
  readonly localWorldSize: number
  /** Equal for ranks that can share memory. */
  readonly machine: string
  readonly host: string
  readonly pid: number
  readonly chunkBytes: number
}

/**
 * Which ranks share a machine. Machines are ordered by their lowest rank, which is the leader, and ranks on each of them
 * by number.
 */
export class Machines {
  /** The ranks of each machine. */
  readonly ranks: readonly (readonly number[])[]
  readonly worldSize: number
  /** Machine of the rank that this was made on. */
  readonly own: number
  readonly #cards: readonly Card[]

  /**
   * @param cards those of all ranks, in rank order
   * @param rank the rank of this process
   * @throws RankwiseError `MPI_MACHINES`, `CHUNK_BYTES`, `RENDEZVOUS_ADDRESS` when what the ranks say of themselves does
   *   not fit together; the same on every rank, as all see the same cards
   */
  constructor(cards: readonly Card[], rank: number) {
    this.#cards = cards
    this.worldSize = cards.length
    this.ranks = groupByMachine(cards)
    this.own = this.machineOf(rank)
    for (const ranks of this.ranks) requireComplete(ranks, cards)
    requireSameChunks(cards)
    requireReachable(cards)
  }

  get count(): number {
    return this.ranks.length
  }

  /** Ranks of the machine that this was made on. */
  get ownRanks(): readonly number[] {
    return this.ranks[this.own] as readonly number[]
  }

  machineOf(rank: number): number {
    return this.ranks.findIndex((ranks) => ranks.includes(rank))
  }

  /** `rank 3 (process 4711 on host b)` */
  describe(rank: number): string {
    const { pid, host } = this.#cards[rank] as Card
    return `rank ${rank} (process ${pid} on ${host})`
  }
}

/** Local rank 0 begins a new group, so that launchers with one address each may share a machine. */
function groupByMachine(cards: readonly Card[]): number[][] {
  const machines: number[][] = []
  const current = new Map<string, number[]>()
  for (const { rank, machine, localRank } of cards) {
    const open = current.get(machine)
    if (open !== undefined && localRank !== 0) {
      open.push(rank)
      continue
    }
    const ranks = [rank]
    current.set(machine, ranks)
    machines.push(ranks)
  }
  return machines
}

function requireComplete(ranks: readonly number[], cards: readonly Card[]): void {
  const group = ranks.map((rank) => cards[rank] as Card)
  const fits = group.every(
    ({ localRank, localWorldSize }, index) => localRank === index && localWorldSize === ranks.length,
  )
  if (fits) return
  throw new RankwiseError('MPI_MACHINES', 'the ranks of a machine contradict each other', {
    where: group[0]?.host as string,
    actual: {
      ranks,
      LOCAL_RANK: group.map(({ localRank }) => localRank),
      LOCAL_WORLD_SIZE: group.map(({ localWorldSize }) => localWorldSize),
    },
    rule: 'the ranks of a machine have LOCAL_RANK 0, 1, ... in rank order and LOCAL_WORLD_SIZE is their number',
    remedy: 'start all ranks with one launcher, in one container on each machine',
  })
}

function requireSameChunks(cards: readonly Card[]): void {
  const sizes = cards.map(({ chunkBytes }) => chunkBytes)
  if (sizes.every((size) => size === sizes[0])) return
  throw new RankwiseError('CHUNK_BYTES', 'the ranks have different chunks', {
    actual: { chunkBytes: sizes },
    rule: 'chunkBytes is the same on all ranks',
  })
}

/** Where all run on one kernel, "machines" may meet at a loopback address. */
function requireReachable(cards: readonly Card[]): void {
  const [first] = cards
  const own = cards.find(({ address }) => isLoopback(address))
  if (own === undefined || cards.every(({ machine }) => machine === first?.machine)) return
  throw new RankwiseError('RENDEZVOUS_ADDRESS', `rank ${own.rank} can be reached from its own machine only`, {
    actual: { address: own.address },
    rule: 'MASTER_ADDR is an address of rank 0 that means the same on every machine',
    remedy: 'give the IP address of the machine of rank 0 as MASTER_ADDR',
  })
}

function isLoopback(address: string): boolean {
  return address.startsWith('127.') || address === '::1'
}

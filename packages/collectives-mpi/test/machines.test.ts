import fc from 'fast-check'
import { describe, expect, test } from 'vitest'
import { chunkMemory, chunkMemoryBytes } from '../src/chunk-memory.ts'
import { type Card, Machines } from '../src/machines.ts'

/** The cards of ranks: machine, local rank and number of ranks there. */
function cardsOf(places: readonly (readonly [string, number, number])[]): Card[] {
  return places.map(([machine, localRank, localWorldSize], rank) => {
    const card = {
      rank,
      machine,
      localRank,
      localWorldSize,
      address: '10.0.0.1',
      port: 1,
      nonce: '',
      host: machine,
      pid: 100 + rank,
    }
    return { ...card, chunkBytes: 4096 }
  })
}

const byNode = cardsOf([
  ['a', 0, 2],
  ['b', 0, 2],
  ['a', 1, 2],
  ['b', 1, 2],
])

describe('Machines', () => {
  test.each<[string, Card[], number[][]]>([
    [
      'ranks in a row',
      cardsOf([
        ['a', 0, 2],
        ['a', 1, 2],
        ['b', 0, 1],
      ]),
      [[0, 1], [2]],
    ],
    [
      'ranks that take turns',
      byNode,
      [
        [0, 2],
        [1, 3],
      ],
    ],
    [
      'two launchers on one machine',
      cardsOf([
        ['a', 0, 2],
        ['a', 1, 2],
        ['a', 0, 2],
        ['a', 1, 2],
      ]),
      [
        [0, 1],
        [2, 3],
      ],
    ],
    [
      'one machine',
      cardsOf([
        ['a', 0, 2],
        ['a', 1, 2],
      ]),
      [[0, 1]],
    ],
  ])('%s', (_, cards, ranks) => {
    const machines = new Machines(cards, 1)
    expect(machines.ranks).toEqual(ranks)
    expect(machines.ownRanks).toContain(1)
    for (const [machine, members] of ranks.entries()) {
      for (const rank of members) expect(machines.machineOf(rank)).toBe(machine)
    }
  })

  test('names a rank, its process and its host', () => {
    expect(new Machines(byNode, 0).describe(3)).toBe('rank 3 (process 103 on b)')
  })

  test.each<[string, string, Card[]]>([
    [
      'too few ranks',
      'MPI_MACHINES',
      cardsOf([
        ['a', 0, 2],
        ['b', 0, 1],
      ]),
    ],
    [
      'too many',
      'MPI_MACHINES',
      cardsOf([
        ['a', 0, 1],
        ['a', 1, 1],
      ]),
    ],
    [
      'two with one place',
      'MPI_MACHINES',
      cardsOf([
        ['a', 0, 3],
        ['a', 1, 3],
        ['a', 1, 3],
      ]),
    ],
    ['unlike chunks', 'CHUNK_BYTES', byNode.map((card) => ({ ...card, chunkBytes: 64 * (card.rank + 1) }))],
    ['a loopback address', 'RENDEZVOUS_ADDRESS', byNode.map((card) => ({ ...card, address: '127.0.1.1' }))],
  ])('refuses %s', (_, code, cards) => {
    expect(() => new Machines(cards, 0)).toThrow(expect.objectContaining({ code }))
  })
})

test('the memory of a leader has room for all that it takes, and for every reduction', () => {
  const sizes = fc.array(fc.integer({ min: 1, max: 8 }), { minLength: 2, maxLength: 10 })
  fc.assert(
    fc.property(sizes, fc.integer({ min: 80, max: 1000 }), (counts, lines) => {
      const places = counts.flatMap((count, machine) =>
        Array.from({ length: count }, (_, localRank) => [`${machine}`, localRank, count] as const),
      )
      const machines = new Machines(cardsOf(places), 0)
      const chunkBytes = 64 * lines
      let used = 0
      const region = (bytes: number) => {
        const start = used
        used += Math.ceil(bytes / 4096) * 4096
        return { bytes: new Uint8Array(bytes), start }
      }
      const { chunks } = chunkMemory(machines, chunkBytes, region)
      expect(used).toBe(chunkMemoryBytes(machines, chunkBytes))
      const part = Math.max(Math.floor(chunkBytes / machines.worldSize / 64) * 64, 8)
      const room = chunks[0].contributions.bytes.length
      expect(room).toBeGreaterThanOrEqual(part * Math.max(...counts) * counts.length)
      expect(room).toBeGreaterThanOrEqual(counts.length === 2 ? 2 * chunkBytes : chunkBytes)
    }),
  )
})

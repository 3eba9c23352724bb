import { afterAll, beforeAll, beforeEach, describe, expect, test } from 'vitest'
import { availableMemory, requireAvailable } from '../src/available-memory.ts'
import type { SharedExchange } from '../src/exchange.ts'
import type { TransportName } from '../src/index.ts'
import { SharedAllocations } from '../src/shared-allocations.ts'
import type { SharedMemory } from '../src/shared-memory.ts'
import { BARRIER, type Held, Ranks } from './ranks.ts'

/** More than a block of the reduction for each rank, and an odd number. */
const ELEMENTS = 3 * 300_000 + 1

describe.each<TransportName>(['shm', 'tcp'])('over %s', (transport) => {
  /** Mappings that groups of shared memory have. */
  const held = (count: number) => Array(3).fill(transport === 'shm' ? count : 0)
  let ranks: Ranks
  beforeAll(() => {
    ranks = new Ranks(3)
  })
  beforeEach(() => ranks.init({ transport }))
  afterAll(() => ranks[Symbol.asyncDispose]())

  const all = (command: Parameters<Ranks['ask']>[1]) => ranks.all(() => command)
  const mappings = async () => ((await all({ do: 'held' })) as Held[]).map((held) => held.mappings)

  test('a tensor in shared memory is reduced in place, again and again', async () => {
    await all({ do: 'allocate', elements: ELEMENTS })
    expect(await mappings()).toEqual(held(2))
    for (let i = 0; i < 3; i++) {
      await all({ do: 'reduceShared' })
      expect(await all({ do: 'readShared' })).toEqual(Array(3).fill([6, 6]))
    }
  })

  test('after dispose the memory is given back, views read zeros, and operations are refused', async () => {
    await all({ do: 'allocate', elements: ELEMENTS })
    await all({ do: 'reduceShared' })
    await all({ do: 'dispose' })
    await all({ do: 'dispose' })
    expect(await mappings()).toEqual(held(1))
    expect(await all({ do: 'readShared' })).toEqual(Array(3).fill([0, 0]))
    const replies = await ranks.settle(() => ({ do: 'reduceShared' }))
    expect(replies.map(({ error }) => error?.code)).toEqual(Array(3).fill('TENSOR_DISPOSED'))
    await all({ do: 'run', call: BARRIER })
  })

  test('destroy gives the memory back too, and views of it do not crash', async () => {
    await all({ do: 'allocate', elements: ELEMENTS })
    await all({ do: 'reduceShared' })
    await all({ do: 'destroy' })
    expect(await mappings()).toEqual(held(0))
    expect(await all({ do: 'readShared' })).toEqual(Array(3).fill([0, 0]))
  })

  test('ranks that allocate differently are told', async () => {
    const replies = await ranks.settle((rank) => ({ do: 'allocate', elements: rank === 1 ? 5 : 4 }))
    for (const { error } of replies) {
      expect(error?.code).toBe('COLLECTIVE_MISMATCH')
      expect(error?.actual?.['rank 1 at']).toMatch(/^allocate #1 \(1 x float32, 20 bytes/)
    }
  })

  // Over TCP a tensor travels from wherever it is.
  test.runIf(transport === 'shm')('ranks that reduce in different places are told', async () => {
    await all({ do: 'allocate', elements: ELEMENTS })
    const bytes = new Uint8Array(4 * ELEMENTS)
    const call = { kind: 'allReduce' as const, tensors: [{ dtype: 'float32' as const, shape: [ELEMENTS], bytes }] }
    const replies = await ranks.settle((rank) => (rank === 1 ? { do: 'run', call } : { do: 'reduceShared' }))
    for (const { error } of replies) {
      expect(error?.code).toBe('COLLECTIVE_MISMATCH')
      expect(error?.actual?.['rank 0 at']).toMatch(/in shared memory, place/)
      expect(error?.actual?.['rank 1 at']).not.toMatch(/in shared memory/)
    }
  })

  test('more memory than there is is refused on every rank, and the group goes on', async () => {
    // Beyond what one mapping, or one ArrayBuffer, can hold.
    const elements = transport === 'shm' ? 2 ** 29 : 2 ** 52
    const replies = await ranks.settle(() => ({ do: 'allocate', elements }))
    for (const { error } of replies) {
      expect(error?.code).toBe('SHARED_MEMORY')
      expect(error?.message).toMatch('rank 0 failed')
    }
    await all({ do: 'run', call: BARRIER })
    expect(await mappings()).toEqual(held(1))
  })
})

describe('memory that is not there', () => {
  test('is refused before it is taken', () => {
    const available = availableMemory()
    expect(available).toBeGreaterThan(2 ** 20)
    expect(available).toBeLessThan(Number.POSITIVE_INFINITY)
    expect(() => requireAvailable(2 ** 20)).not.toThrow()
    expect(() => requireAvailable(2 ** 50)).toThrow(expect.objectContaining({ code: 'SHARED_MEMORY' }))
  })
})

test('memory is unmapped when nothing can reach it any more', () => {
  const memory = { bytes: new Uint8Array(8192), view: () => new ArrayBuffer(4), detach() {} } as unknown as SharedMemory
  const allocations = new SharedAllocations({} as SharedExchange, 0, 2)
  const { release } = allocations.add(memory, 4)
  release()
  release()
  allocations.releaseAll()
})

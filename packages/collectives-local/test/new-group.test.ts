import { afterAll, beforeAll, beforeEach, describe, expect, test } from 'vitest'
import type { TransportName } from '../src/index.ts'
import { BARRIER, type Call, endOf, type Held, Ranks } from './ranks.ts'

const ONE: Call = {
  kind: 'allReduce',
  tensors: [{ dtype: 'float32', shape: [1], bytes: new Uint8Array(new Float32Array([1]).buffer) }],
}

describe.each<TransportName>(['shm', 'tcp'])('over %s', (transport) => {
  /** Mappings that groups of shared memory have. */
  const held = (...mappings: number[]) => mappings.map((count) => (transport === 'shm' ? count : 0))
  let ranks: Ranks
  beforeAll(() => {
    ranks = new Ranks(3)
  })
  beforeEach(() => ranks.init({ transport }))
  afterAll(() => ranks[Symbol.asyncDispose]())

  test('members get the new group, numbered by their rank, the others nothing', async () => {
    const places = await ranks.all(() => ({ do: 'newGroup', ranks: [2, 0] }))
    expect(places).toEqual([
      [0, 2],
      [1, 3],
      [1, 2],
    ])
    const replies = await Promise.all([0, 2].map((rank) => ranks.ask(rank, { do: 'run', call: ONE })))
    for (const { value } of replies) {
      expect(new Float32Array((value as Uint8Array[])[0]?.slice().buffer as ArrayBuffer)).toEqual(new Float32Array([2]))
    }
  })

  test.each([[[]], [[0, 0]], [[3]], [[-1]], [[0.5]]])('ranks %j are refused', async (members) => {
    const replies = await ranks.settle(() => ({ do: 'newGroup', ranks: members }))
    expect(replies.map(({ error }) => error?.code)).toEqual(Array(3).fill('GROUP_RANKS'))
    await ranks.all(() => ({ do: 'run', call: BARRIER }))
  })

  test('ranks that name different members are told', async () => {
    const replies = await ranks.settle((rank) => ({ do: 'newGroup', ranks: rank === 0 ? [0, 1] : [0, 2] }))
    for (const { error } of replies) {
      expect(error?.code).toBe('COLLECTIVE_MISMATCH')
      expect(error?.actual?.['rank 0 at']).toMatch(/^newGroup #1 \(2 ranks, members/)
    }
  })

  test('a rank that dies is named with its group', async () => {
    await ranks.all(() => ({ do: 'newGroup', ranks: [1, 2] }))
    const waiting = ranks.ask(1, { do: 'run', call: BARRIER })
    ranks.kill(2, 'SIGKILL')
    const { error } = await waiting
    expect(error).toMatchObject({ code: 'RANK_LOST', where: 'barrier #1 in the group of ranks 1, 2' })
    expect(error?.message).toMatch(endOf(transport, 1))
  })

  test('a group outlives the one it was made from, and nothing is left of either', async () => {
    await ranks.all(() => ({ do: 'newGroup', ranks: [0, 1, 2] }))
    const before = (await ranks.all(() => ({ do: 'held' }))) as Held[]
    expect(before.map(({ mappings }) => mappings)).toEqual(held(2, 2, 2))
    await ranks.all(() => ({ do: 'run', call: ONE }))
    const places = await ranks.all(() => ({ do: 'newGroup', ranks: [1] }))
    expect(places[1]).toEqual([0, 1])
    expect((await ranks.ask(1, { do: 'run', call: ONE })).error).toBeUndefined()
    await ranks.all(() => ({ do: 'destroy' }))
    const after = (await ranks.all(() => ({ do: 'held' }))) as Held[]
    expect(after.map(({ mappings }) => mappings)).toEqual([0, 0, 0])
  })
})

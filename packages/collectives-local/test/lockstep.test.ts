import type { Operation } from '@rankwise/core/collectives'
import { afterEach, beforeEach, expect, test } from 'vitest'
import { Arena } from '../src/arena.ts'
import { newCursor } from '../src/cursor.ts'
import { FailureDetector } from '../src/failure-detector.ts'
import { Lockstep } from '../src/lockstep.ts'
import { type Member, thisMember } from '../src/member.ts'
import { loadNative } from '../src/native.ts'

// Two ranks in one process: the order of their steps is then the one of the test.

let arena: Arena
let ranks: [Lockstep, Lockstep]
beforeEach(async () => {
  arena = Arena.create(await loadNative(), 2, 4096, 1)
  const members: Member[] = [0, 1].map(thisMember)
  const lockstep = (rank: number) =>
    new Lockstep(arena, new FailureDetector(arena, members, rank), newCursor(), { rank, timeoutMs: 5_000 })
  ranks = [lockstep(0), lockstep(1)]
})
afterEach(() => arena.destroy())

const barrier = (sequence: number): Operation => ({ sequence, kind: 'barrier', tensors: [] })

test('a rank that is ahead does not disturb one that still compares', async () => {
  const [fast, slow] = ranks
  const waiting = slow.run(barrier(1), undefined, (turn) => slow.meet(turn))
  // Wakes the slow rank, which needs a turn of the event loop to see it, and is in the next operation by then.
  await fast.run(barrier(1), undefined, (turn) => fast.meet(turn))
  const next = fast.run(barrier(2), undefined, (turn) => fast.meet(turn))
  await waiting
  await slow.run(barrier(2), undefined, (turn) => slow.meet(turn))
  await next
})

test('an error in the middle of an operation ends the group instead of leaving the others waiting', async () => {
  const [one, other] = ranks
  const waiting = one.run(barrier(1), undefined, (turn) => one.meet(turn))
  const broken = (async () =>
    other.run(barrier(1), undefined, () => {
      throw new TypeError('detached')
    }))()
  await expect(broken).rejects.toThrow(TypeError)
  await expect(waiting).rejects.toMatchObject({ code: 'RANK_LOST', actual: { ranks: [1] } })
  await expect(waiting).rejects.toThrow('rank 1 failed: detached')
})

test('an operation that exchanges nothing still meets the others', async () => {
  const [one, other] = ranks
  const results = [one, other].map((rank) => rank.run(barrier(1), undefined, () => 'done'))
  expect(await Promise.all(results)).toEqual(['done', 'done'])
  const lonely = one.run(barrier(2), undefined, () => 'done')
  other.leave()
  await expect(lonely).rejects.toMatchObject({ code: 'RANK_LOST' })
})

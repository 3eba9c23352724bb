import { readdirSync } from 'node:fs'
import { setTimeout } from 'node:timers/promises'
import { afterAll, beforeAll, describe, expect, test } from 'vitest'
import type { TransportName } from '../src/index.ts'
import { BARRIER, type Call, endOf, Ranks, type Reply } from './ranks.ts'

/** What the interface promises: survivors fail within this time. */
const NOTICE_MS = 2_000

const FLOATS: Call = { kind: 'allReduce', tensors: [{ dtype: 'float32', shape: [4], bytes: new Uint8Array(16) }] }

let ranks: Ranks
beforeAll(() => {
  ranks = new Ranks(3)
})
afterAll(() => ranks[Symbol.asyncDispose]())

const others = (rank: number) => [0, 1, 2].filter((other) => other !== rank)

function run(rank: number, call: Call = FLOATS): Promise<Reply> {
  return ranks.ask(rank, { do: 'run', call })
}

async function runAll(call: Call = FLOATS): Promise<Reply[]> {
  return Promise.all([0, 1, 2].map((rank) => run(rank, call)))
}

describe.each<TransportName>(['shm', 'tcp'])('over %s', (transport) => {
  const init = (options: { timeoutMs?: number } = {}) => ranks.init({ ...options, transport })

  /** Every survivor can leave and end by itself, holding nothing. */
  async function expectCleanExit(survivors: readonly number[]): Promise<void> {
    for (const rank of survivors) {
      expect((await ranks.ask(rank, { do: 'destroy' })).error).toBeUndefined()
      expect((await ranks.ask(rank, { do: 'held' })).value).toMatchObject({ mappings: 0 })
      void ranks.ask(rank, { do: 'finish' })
      expect(await ranks.processes[rank]?.exited).toEqual({ code: 0, signal: null })
    }
  }

  describe.each([0, 1, 2])('rank %i is killed', (dead) => {
    test('while the others wait: they name it and the operation in time, and so does every later operation', async () => {
      await init()
      await runAll()
      const waiting = others(dead).map((rank) => run(rank))
      await setTimeout(200)
      const killed = performance.now()
      ranks.kill(dead, 'SIGKILL')
      for (const { error } of await Promise.all(waiting)) {
        expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [dead] } })
        expect(error?.message).toMatch(endOf(transport, dead))
        expect(error?.where).toMatch(/^allReduce #2 /)
      }
      expect(performance.now() - killed).toBeLessThan(NOTICE_MS)

      for (const { error } of await Promise.all(others(dead).map((rank) => run(rank, BARRIER)))) {
        expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [dead] }, where: 'barrier #3' })
      }
      await expectCleanExit(others(dead))
      expect(readdirSync('/dev/shm').filter((name) => name.includes('rankwise'))).toEqual([])
    })
  })

  test('a rank that is killed while nobody waits is named by the next operation', async () => {
    await init()
    await runAll()
    ranks.kill(1, 'SIGKILL')
    await ranks.processes[1]?.exited
    for (const { error, ms } of await Promise.all([run(0), run(2)])) {
      expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [1] } })
      expect(ms).toBeLessThan(NOTICE_MS)
    }
  })

  test('a rank that waits finds out by itself while rank 0 is busy', async () => {
    await init()
    const busy = ranks.ask(0, { do: 'block', ms: 3_000 })
    const waiting = run(1)
    await setTimeout(100)
    ranks.kill(2, 'SIGKILL')
    const { error, ms } = await waiting
    expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [2] } })
    expect(ms).toBeLessThan(NOTICE_MS)
    await busy
  })

  test('two ranks that are killed are both named', async () => {
    await init()
    const waiting = run(1)
    ranks.kill(0, 'SIGSTOP')
    ranks.kill(2, 'SIGSTOP')
    ranks.kill(1, 'SIGSTOP')
    ranks.kill(0, 'SIGKILL')
    ranks.kill(2, 'SIGKILL')
    await Promise.all([ranks.processes[0]?.exited, ranks.processes[2]?.exited])
    ranks.kill(1, 'SIGCONT')
    expect((await waiting).error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [0, 2] } })
  })

  test('a rank that ends without destroy is lost', async () => {
    await init()
    void ranks.ask(2, { do: 'finish' })
    expect((await run(0)).error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [2] } })
  })

  test('a rank that leaves while the others wait is said to have left', async () => {
    await init()
    const waiting = [run(0), run(1)]
    await ranks.ask(2, { do: 'destroy' })
    for (const { error } of await Promise.all(waiting)) {
      expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [2] } })
      expect(error?.message).toMatch('rank 2 left the group')
    }
  })

  test('a rank that leaves after the last operation does not harm those that are slower', async () => {
    await init()
    for (let i = 0; i < 20; i++) {
      const replies = await Promise.all(
        [0, 1, 2].map(async (rank) => {
          const reply = await run(rank, BARRIER)
          await ranks.ask(rank, { do: 'destroy' })
          return reply
        }),
      )
      expect(replies.flatMap(({ error }) => error ?? [])).toEqual([])
      await init()
    }
  })

  test('destroy ends an operation that is waiting', async () => {
    await init()
    const waiting = run(0)
    await setTimeout(100)
    await ranks.ask(0, { do: 'destroy' })
    expect((await waiting).error?.code).toBe('COLLECTIVES_DESTROYED')
  })

  describe('a rank that does not come in time', () => {
    test('stopped: the others name it and its state, and it learns of it when it goes on', async () => {
      // Over TCP a rank is taken for stopped when it has said nothing for 0.75 s.
      const timeoutMs = transport === 'shm' ? 600 : 1_500
      await init({ timeoutMs })
      ranks.kill(1, 'SIGSTOP')
      const replies = await Promise.all([run(0), run(2)])
      const state = {
        shm: `rank 1 (process ${ranks.processes[1]?.pid}, state T)`,
        tcp: expect.stringMatching(`rank 1 \\(process ${ranks.processes[1]?.pid}\\), silent for \\d+ ms`),
      }
      expect(replies.flatMap(({ error }) => error?.actual?.missing)).toContainEqual(state[transport])
      for (const { error, ms } of replies) {
        expect(error).toMatchObject({ code: 'COLLECTIVE_TIMEOUT', actual: { ranks: [1] } })
        expect(error?.message).toMatch(
          /rank 1 did not arrive at allReduce #1 in time: the process of rank 1 (is stopped|says nothing)/,
        )
        expect(ms).toBeGreaterThan(timeoutMs - 200)
        expect(ms).toBeLessThan(timeoutMs + 1_000)
      }
      const late = run(1)
      ranks.kill(1, 'SIGCONT')
      expect((await late).error).toMatchObject({ code: 'COLLECTIVE_TIMEOUT', actual: { ranks: [1] } })
    })

    test('busy for less than the timeout is no failure', async () => {
      await init({ timeoutMs: 5_000 })
      const busy = ranks.ask(1, { do: 'block', ms: 700 })
      expect((await runAll()).flatMap(({ error }) => error ?? [])).toEqual([])
      await busy
    })
  })

  describe('ranks at different operations', () => {
    test.each<[string, Call, RegExp]>([
      ['kind', BARRIER, /barrier #1/],
      ['reduction', { ...FLOATS, op: 'max' }, /allReduce #1 \(max/],
      ['size', { ...FLOATS, tensors: [{ dtype: 'float32', shape: [2], bytes: new Uint8Array(8) }] }, /8 bytes/],
      ['dtype', { ...FLOATS, tensors: [{ dtype: 'int32', shape: [4], bytes: new Uint8Array(16) }] }, /1 x int32/],
      ['shape', { ...FLOATS, tensors: [{ dtype: 'float32', shape: [2, 2], bytes: new Uint8Array(16) }] }, /layout/],
    ])('another %s is reported on every rank, with the rank', async (_, other, text) => {
      await init()
      const replies = await Promise.all([run(0), run(1, other), run(2)])
      for (const { error } of replies) {
        expect(error?.code).toBe('COLLECTIVE_MISMATCH')
        expect(error?.actual?.['rank 0 at']).toMatch(/^allReduce #1 \(sum, 1 x float32, 16 bytes/)
        expect(error?.actual?.['rank 1 at']).toMatch(text)
        expect(error?.actual?.['rank 1 at']).not.toEqual(error?.actual?.['rank 0 at'])
      }
    })

    test('a rank that skipped an operation is found by its number', async () => {
      await init()
      const refused: Call = { ...FLOATS, op: 'mean' as 'sum' }
      expect((await run(1, refused)).error?.code).toBe('COLLECTIVE_OP')
      const [first] = await runAll()
      expect(first?.error).toMatchObject({ code: 'COLLECTIVE_MISMATCH' })
      expect(first?.error?.actual?.['rank 1 at']).toMatch(/^allReduce #2/)
    })
  })

  describe('abort', () => {
    test('by signal: ABORTED here, and the others name this rank', async () => {
      await init()
      const waiting = [run(0), run(1)]
      await setTimeout(100)
      const aborted = performance.now()
      await ranks.ask(1, { do: 'abortSignal' })
      const [other, own] = await Promise.all(waiting)
      expect(performance.now() - aborted).toBeLessThan(NOTICE_MS)
      expect(own?.error).toMatchObject({ code: 'ABORTED', actual: { ranks: [1] } })
      expect(other?.error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [1] } })
      expect(other?.error?.message).toMatch('rank 1 aborted allReduce #1')
      expect((await run(2)).error?.code).toBe('RANK_LOST')
      expect((await run(1)).error?.code).toBe('ABORTED')
      await expectCleanExit([0, 1, 2])
    })

    test('of the group: pending and later operations of every rank fail with the reason', async () => {
      await init()
      const waiting = [run(0), run(1)]
      await setTimeout(100)
      await ranks.ask(2, { do: 'abort', message: 'out of "memory"\n\u{1F4A5}' })
      for (const { error } of [...(await Promise.all(waiting)), await run(0), await run(2)]) {
        expect(error?.code).toBe('ABORTED')
        expect(error?.message).toContain('rank 2 aborted the group: out of "memory"\n\u{1F4A5}')
      }
    })

    test('the longest reason arrives cut, not broken', async () => {
      await init()
      await ranks.ask(2, { do: 'abort', message: '\u0000'.repeat(10_000) })
      expect((await run(0)).error?.code).toBe('ABORTED')
    })
  })
})

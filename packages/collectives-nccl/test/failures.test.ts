import { setTimeout } from 'node:timers/promises'
import { afterAll, beforeAll, describe, expect, test } from 'vitest'
import { BARRIER, type Call, Ranks, type Reply } from './ranks.ts'
import { leaks, NO_COMPILER } from './stub.ts'

/** What the interface promises: survivors fail within this time. */
const NOTICE_MS = 2_000

const FLOATS: Call = { kind: 'allReduce', tensors: [{ dtype: 'float32', shape: [4], bytes: new Uint8Array(16) }] }

describe.skipIf(NO_COMPILER !== undefined)('three ranks', () => {
  let ranks: Ranks
  beforeAll(() => {
    ranks = new Ranks(3)
  })
  afterAll(() => ranks?.[Symbol.asyncDispose]())

  const others = (rank: number) => [0, 1, 2].filter((other) => other !== rank)
  const run = (rank: number, call: Call = FLOATS) => ranks.run(rank, call)
  const runAll = (call: Call = FLOATS): Promise<Reply[]> => Promise.all([0, 1, 2].map((rank) => run(rank, call)))

  /** Every survivor can leave, and holds nothing any more. */
  async function expectNothingHeld(survivors: readonly number[]): Promise<void> {
    for (const rank of survivors) {
      expect((await ranks.ask(rank, { do: 'destroy' })).error).toBeUndefined()
      expect(leaks(ranks.calls(rank))).toEqual({})
      expect((await ranks.ask(rank, { do: 'held' })).value).toMatchObject({ shared: 0 })
      expect(ranks.calls(rank).filter((line) => line.startsWith('VIOLATION'))).toEqual([])
    }
  }

  test('a rank that is killed while the others wait: they name it and the operation, and so does every later one', async () => {
    await ranks.init()
    await runAll()
    const waiting = others(1).map((rank) => run(rank))
    await setTimeout(200)
    const killed = performance.now()
    ranks.kill(1, 'SIGKILL')
    for (const { error } of await Promise.all(waiting)) {
      expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [1] } })
      expect(error?.message).toMatch('the process of rank 1 has ended')
      expect(error?.where).toMatch(/^allReduce #2 /)
    }
    expect(performance.now() - killed).toBeLessThan(NOTICE_MS)
    for (const { error } of await Promise.all(others(1).map((rank) => run(rank, BARRIER)))) {
      expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [1] }, where: 'barrier #3' })
    }
    await expectNothingHeld(others(1))
  })

  test('a rank that is killed while nobody waits is named by the next operation', async () => {
    await ranks.init()
    ranks.kill(0, 'SIGKILL')
    await ranks.processes[0]?.exited
    for (const { error, ms } of await Promise.all([run(1), run(2)])) {
      expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [0] } })
      expect(ms).toBeLessThan(NOTICE_MS)
    }
  })

  test('a rank that leaves while the others wait is said to have left', async () => {
    await ranks.init()
    const waiting = [run(0), run(1)]
    await ranks.ask(2, { do: 'destroy' })
    for (const { error } of await Promise.all(waiting)) {
      expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [2] } })
      expect(error?.message).toMatch('rank 2 left the group')
    }
    await expectNothingHeld([0, 1, 2])
  })

  test('a rank that leaves after the last operation does not harm those that are slower', async () => {
    for (let i = 0; i < 5; i++) {
      await ranks.init()
      const replies = await Promise.all(
        [0, 1, 2].map(async (rank) => {
          const reply = await run(rank, BARRIER)
          await ranks.ask(rank, { do: 'destroy' })
          return reply
        }),
      )
      expect(replies.flatMap(({ error }) => error ?? [])).toEqual([])
    }
  })

  test('destroy ends an operation that is waiting', async () => {
    await ranks.init()
    const waiting = run(0)
    await setTimeout(50)
    await ranks.ask(0, { do: 'destroy' })
    expect((await waiting).error?.code).toBe('COLLECTIVES_DESTROYED')
    expect(ranks.calls(0)).toContain('ncclCommAbort')
    await expectNothingHeld([0])
  })

  test('a stopped rank: the others name it and its state in time, and it learns of it when it goes on', async () => {
    await ranks.init({ timeoutMs: 800 })
    ranks.kill(1, 'SIGSTOP')
    const replies = await Promise.all([run(0), run(2)])
    for (const { error, ms } of replies) {
      expect(error).toMatchObject({ code: 'COLLECTIVE_TIMEOUT', actual: { ranks: [1] } })
      expect(error?.message).toMatch('rank 1 did not arrive at allReduce #1 in time')
      expect(ms).toBeGreaterThan(700)
      expect(ms).toBeLessThan(800 + 1_000)
    }
    const state = `rank 1 (process ${ranks.processes[1]?.child.pid}, state T)`
    expect(replies.map(({ error }) => error?.actual?.missing)).toContain(state)
    const late = run(1)
    ranks.kill(1, 'SIGCONT')
    expect((await late).error).toMatchObject({ code: 'COLLECTIVE_TIMEOUT', actual: { ranks: [1] } })
    await expectNothingHeld([0, 1, 2])
  })

  test('NCCL that hangs although all ranks came is aborted after the timeout, and nobody is blamed', async () => {
    await ranks.init({ timeoutMs: 600 })
    await ranks.inject(2, 'hang')
    const replies = await runAll()
    for (const { error, ms } of replies) {
      expect(error?.code).toBe('COLLECTIVE_TIMEOUT')
      expect(error?.actual).not.toHaveProperty('ranks')
      expect(error?.message).toMatch('all ranks arrived at allReduce #1, but NCCL did not finish it')
      expect(ms).toBeLessThan(600 + 1_000)
    }
    await expectNothingHeld([0, 1, 2])
  })

  test('waiting does not hold the event loop', async () => {
    await ranks.init()
    const waiting = run(0)
    await setTimeout(300)
    const asked = performance.now()
    await ranks.ask(0, { do: 'held' })
    expect(performance.now() - asked).toBeLessThan(300)
    await Promise.all([run(1), run(2)])
    expect((await waiting).error).toBeUndefined()
  })

  test.each<[string, Call, RegExp]>([
    ['kind', BARRIER, /barrier #1/],
    ['reduction', { ...FLOATS, op: 'max' }, /allReduce #1 \(max/],
    ['size', { ...FLOATS, tensors: [{ dtype: 'float32', shape: [2], bytes: new Uint8Array(8) }] }, /8 bytes/],
    ['dtype', { ...FLOATS, tensors: [{ dtype: 'int32', shape: [4], bytes: new Uint8Array(16) }] }, /1 x int32/],
    ['place', { ...FLOATS, onDevice: true }, /on the device/],
  ])('another %s is reported on every rank before NCCL sees it', async (_, other, text) => {
    await ranks.init()
    const replies = await Promise.all([run(0), run(1, other), run(2)])
    for (const [rank, { error }] of replies.entries()) {
      expect(error?.code).toBe('COLLECTIVE_MISMATCH')
      expect(error?.actual?.['rank 0 at']).toMatch(/^allReduce #1 \(sum, 1 x float32, 16 bytes/)
      expect(error?.actual?.['rank 1 at']).toMatch(text)
      expect(error?.actual?.['rank 1 at']).not.toEqual(error?.actual?.['rank 0 at'])
      expect(ranks.calls(rank).filter((line) => line.startsWith('ncclAllReduce'))).toEqual([])
    }
  })

  test('a rank that skipped an operation is found by its number', async () => {
    await ranks.init()
    expect((await run(1, { ...FLOATS, op: 'mean' as 'sum' })).error?.code).toBe('COLLECTIVE_OP')
    const [first] = await runAll()
    expect(first?.error?.code).toBe('COLLECTIVE_MISMATCH')
    expect(first?.error?.actual?.['rank 1 at']).toMatch(/^allReduce #2/)
  })

  test('abort by signal: ABORTED here, and the others name this rank', async () => {
    await ranks.init()
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
    await expectNothingHeld([0, 1, 2])
  })

  test('abort of the group: pending and later operations of every rank fail with the reason', async () => {
    await ranks.init()
    const waiting = [run(0), run(1)]
    await setTimeout(100)
    await ranks.ask(2, { do: 'abort', message: 'out of "memory"\n\u{1F4A5}' })
    for (const { error } of [...(await Promise.all(waiting)), await run(0), await run(2)]) {
      expect(error?.code).toBe('ABORTED')
      expect(error?.message).toContain('rank 2 aborted the group: out of "memory"\n\u{1F4A5}')
    }
  })

  test.each<[string, string, RegExp]>([
    ['an error that NCCL reports later', 'async:2', /asynchronous operation failed[\s\S]*Net: injected by the test/],
    ['a call that NCCL refuses', 'call:3', /ncclAllGather failed/],
    ['an error of CUDA', 'event:700', /cudaErrorIllegalAddress \(700\): an illegal memory access/],
    ['a copy that fails', 'memcpy', /cudaMemcpyAsync failed/],
    ['memory that is full', 'malloc', /cudaErrorMemoryAllocation \(2\): out of memory/],
  ])('%s is told with the words of the library, and the others name the rank', async (_, fault, text) => {
    await ranks.init()
    await ranks.inject(1, fault)
    const [first, own, last] = await runAll()
    expect(own?.error?.code).toMatch(/^(NCCL|CUDA)_ERROR$/)
    expect(own?.error?.message).toMatch(text)
    for (const reply of [first, last]) {
      expect(reply?.error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [1] } })
      expect(reply?.ms).toBeLessThan(NOTICE_MS)
    }
    await expectNothingHeld([0, 1, 2])
  })

  test('a connection that NCCL loses is explained by the process that has ended', async () => {
    await ranks.init()
    const waiting = run(0)
    ranks.kill(2, 'SIGKILL')
    await ranks.processes[2]?.exited
    await ranks.inject(0, 'async:6')
    expect((await waiting).error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [2] } })
  })

  test('a connection that NCCL loses without a known reason is a lost rank all the same', async () => {
    await ranks.init()
    const waiting = run(0)
    await ranks.inject(0, 'async:6')
    const { error } = await waiting
    expect(error?.code).toBe('RANK_LOST')
    expect(error?.message).toMatch('a rank ended, or the network to it failed: remote process exited')
  })

  test('a store that is gone ends an operation that waits, and is no harm to one that does not', async () => {
    await ranks.init()
    await ranks.all(() => ({ do: 'breakStore' }))
    expect((await runAll()).flatMap(({ error }) => error ?? [])).toEqual([])
    const { error, ms } = await run(1)
    expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [0] } })
    expect(error?.message).toMatch('the store of the group cannot be reached')
    expect(ms).toBeLessThan(NOTICE_MS)
  })

  test('an abort that hangs does not hold up the error, and destroy says what is left', async () => {
    await ranks.init({ timeoutMs: 300 })
    await ranks.inject(0, 'abort-hang')
    const { error, ms } = await run(0)
    expect(error?.code).toBe('COLLECTIVE_TIMEOUT')
    expect(ms).toBeLessThan(300 + 1_000)
    expect((await ranks.ask(0, { do: 'destroy' })).error?.code).toBe('NCCL_CLOSE')
    expect(leaks(ranks.calls(0))).toHaveProperty('cudaMalloc')
    void ranks.ask(0, { do: 'finish' })
    expect(await ranks.processes[0]?.exited).toEqual({ code: 0, signal: null })
  })
})

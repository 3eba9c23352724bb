import { readFile } from 'node:fs/promises'
import { setTimeout } from 'node:timers/promises'
import { processState } from '@rankwise/core'
import { afterAll, beforeAll, describe, expect, test } from 'vitest'
import { BARRIER, type Call, hasMpich, Ranks, type Reply } from './ranks.ts'

/** What the interface promises: survivors fail within this time. */
const NOTICE_MS = 2_000

const FLOATS: Call = { kind: 'allReduce', tensors: [{ dtype: 'float32', shape: [4], bytes: new Uint8Array(16) }] }
const ALL = [0, 1, 2, 3]
const others = (rank: number) => ALL.filter((other) => other !== rank)

// Four ranks and two MPI processes start for most tests: 2 s on two idle cores, much more on busy ones.
const TIMEOUT_MS = 90_000

describe.runIf(hasMpich())('failures on two machines with two ranks each', { timeout: TIMEOUT_MS }, () => {
  let ranks: Ranks
  beforeAll(async () => {
    ranks = new Ranks(4)
    await ranks.ready()
  }, TIMEOUT_MS)
  afterAll(() => ranks[Symbol.asyncDispose]())

  const init = (options: { timeoutMs?: number } = {}) => ranks.init([2, 2], options)
  const run = (rank: number, call: Call = FLOATS): Promise<Reply> => ranks.ask(rank, { do: 'run', call })
  const runAll = () => Promise.all(ALL.map((rank) => run(rank)))

  /** Every survivor can leave, holding nothing. */
  async function expectNothingHeld(survivors: readonly number[]): Promise<void> {
    for (const rank of survivors) {
      expect((await ranks.ask(rank, { do: 'destroy' })).error).toBeUndefined()
      expect((await ranks.ask(rank, { do: 'held' })).value).toMatchObject({ mappings: 0, children: 0 })
    }
  }

  /** Every survivor can end by itself. */
  async function expectEnd(survivors: readonly number[]): Promise<void> {
    for (const rank of survivors) {
      void ranks.ask(rank, { do: 'finish' })
      expect(await ranks.processes[rank]?.exited).toEqual({ code: 0, signal: null })
    }
  }

  test.each([
    ['the leader of the first machine', 0],
    ['the leader of another machine', 2],
    ['another rank', 3],
  ])('%s is killed while the others wait: they name it in time, and it leaves nothing behind', async (_, dead) => {
    await init()
    await runAll()
    const children = await mpiProcessesOf(ranks.processes[dead]?.child.pid as number)
    expect(children).toHaveLength(dead === 3 ? 0 : 1)
    const waiting = others(dead).map((rank) => run(rank))
    await setTimeout(200)
    const killed = performance.now()
    ranks.kill(dead, 'SIGKILL')
    for (const { error } of await Promise.all(waiting)) {
      expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [dead] } })
      expect(error?.message).toMatch(`lost rank ${dead} (process ${ranks.processes[dead]?.child.pid} on `)
      expect(error?.where).toMatch(/^allReduce #2 /)
    }
    expect(performance.now() - killed).toBeLessThan(NOTICE_MS)
    for (const { error } of await Promise.all(others(dead).map((rank) => run(rank, BARRIER)))) {
      expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [dead] }, where: 'barrier #3' })
    }
    await expectNothingHeld(others(dead))
    if (dead === 2) await expectEnd(others(dead))
    const running = () => children.filter((child) => processState(child) !== undefined)
    await expect.poll(running, { timeout: NOTICE_MS }).toEqual([])
  })

  test('an MPI process that is killed is named as what failed', async () => {
    await init()
    const waiting = [0, 1].map((rank) => run(rank))
    const [child] = await mpiProcessesOf(ranks.processes[2]?.child.pid as number)
    process.kill(child as number, 'SIGKILL')
    for (const { error } of await Promise.all(waiting)) {
      expect(error).toMatchObject({ code: 'MPI_FAILED', actual: { ranks: [2] } })
      expect(error?.message).toMatch('MPI failed on rank 2: the MPI process has ended (signal SIGKILL)')
    }
  })

  test('a rank that leaves while the others wait is said to have left', async () => {
    await init()
    const waiting = others(3).map((rank) => run(rank))
    await setTimeout(100)
    const leaving = ranks.ask(3, { do: 'destroy' })
    for (const { error } of await Promise.all(waiting)) {
      expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [3] } })
      expect(error?.message).toMatch('rank 3 left the group')
    }
    await ranks.all(() => ({ do: 'destroy' }))
    expect((await leaving).error).toBeUndefined()
  })

  test('a rank that leaves after the last operation does not harm those that are slower', async () => {
    await init()
    const replies = await Promise.all(
      ALL.map(async (rank) => {
        const reply = await run(rank, BARRIER)
        await ranks.ask(rank, { do: 'destroy' })
        return reply
      }),
    )
    expect(replies.flatMap(({ error }) => error ?? [])).toEqual([])
  })

  test('stopped: the others name it in time, and it learns of it when it goes on', async () => {
    // Long enough to join in while the machine is busy.
    await init({ timeoutMs: 10_000 })
    ranks.kill(2, 'SIGSTOP')
    const replies = await Promise.all(others(2).map((rank) => run(rank)))
    for (const { error, ms } of replies) {
      expect(error).toMatchObject({ code: 'COLLECTIVE_TIMEOUT', actual: { ranks: [2] } })
      expect(error?.message).toMatch(/rank 2 did not arrive at allReduce #1 in time/)
      expect(error?.message).toMatch(/silent for \d+ ms/)
      expect(ms).toBeGreaterThan(9_000)
      expect(ms).toBeLessThan(10_000 + NOTICE_MS)
    }
    const late = run(2)
    ranks.kill(2, 'SIGCONT')
    expect((await late).error?.code).toMatch(/COLLECTIVE_TIMEOUT|RANK_LOST/)
  })

  describe('ranks at different operations', () => {
    test.each<[string, number, Call, RegExp]>([
      ['kind', 3, BARRIER, /barrier #1/],
      [
        'size',
        2,
        { ...FLOATS, tensors: [{ dtype: 'float32', shape: [40_000], bytes: new Uint8Array(160_000) }] },
        /160000 bytes/,
      ],
    ])('another %s is reported on every rank, with the rank', async (_, odd, other, text) => {
      await init()
      const replies = await Promise.all(ALL.map((rank) => run(rank, rank === odd ? other : FLOATS)))
      for (const { error } of replies) {
        expect(error?.code).toBe('COLLECTIVE_MISMATCH')
        expect(error?.actual?.[`rank ${odd} at`]).toMatch(text)
      }
      const neighbour = odd % 2 === 0 ? odd + 1 : odd - 1
      expect(replies[odd]?.error?.actual?.[`rank ${neighbour} at`]).toMatch(/^allReduce #1 \(sum, 1 x float32, 16/)
    })

    test('a whole machine that is elsewhere', async () => {
      await init()
      const replies = await Promise.all(ALL.map((rank) => run(rank, rank < 2 ? FLOATS : BARRIER)))
      for (const { error } of replies) {
        expect(error?.code).toBe('COLLECTIVE_MISMATCH')
        expect(error?.actual).toMatchObject({ 'rank 2 at': 'barrier #1', 'rank 3 at': 'barrier #1' })
        expect(error?.actual?.['rank 0 at']).toMatch(/^allReduce #1/)
      }
    })
  })

  test('a signal: ABORTED on its rank, and the others name this rank', async () => {
    await init()
    const waiting = others(0).map((rank) => run(rank))
    await setTimeout(100)
    await ranks.ask(3, { do: 'abortSignal' })
    const [one, two, own] = await Promise.all(waiting)
    expect(own?.error).toMatchObject({ code: 'ABORTED', actual: { ranks: [3] } })
    for (const other of [one, two]) {
      expect(other?.error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [3] } })
      expect(other?.error?.message).toMatch('rank 3 aborted allReduce #1')
    }
    expect((await run(0)).error?.code).toBe('RANK_LOST')
    await expectNothingHeld(ALL)
  })

  test('abort: pending and later operations of every rank fail with the reason', async () => {
    await init()
    const waiting = [run(0), run(1), run(3)]
    await setTimeout(100)
    await ranks.ask(2, { do: 'abort', message: 'out of "memory"\n\u{1F4A5}' })
    for (const { error } of [...(await Promise.all(waiting)), await run(0), await run(2)]) {
      expect(error?.code).toBe('ABORTED')
      expect(error?.message).toContain('rank 2 aborted the group: out of "memory"\n\u{1F4A5}')
    }
  })

  test('a call that is refused on every rank does no harm', async () => {
    await init()
    const call: Call = { kind: 'allReduce', tensors: [{ dtype: 'int64', shape: [1], bytes: new Uint8Array(8) }] }
    const replies = await ranks.settle(() => ({ do: 'run', call }))
    expect(replies.map(({ error }) => error?.code)).toEqual(Array(4).fill('COLLECTIVE_DTYPE'))
    expect((await runAll()).flatMap(({ error }) => error ?? [])).toEqual([])
  })

  describe('ranks that cannot join', () => {
    test('one without MPI is named on all ranks', async () => {
      const replies = await tryInitWithout(ranks, 2)
      for (const { error } of replies) {
        expect(error?.code).toBe('MPI_NOT_FOUND')
        expect(error?.message).toMatch(/no MPI library can be loaded/)
      }
      expect(replies[0]?.error?.message).toMatch(/rank 2 could not join/)
      expect(replies[2]?.error?.message).toMatch(/apt-get install/)
    })

    test('places that contradict each other', async () => {
      const overrides = () => ({ localRank: 0, localWorldSize: 2 })
      const replies = await ranks.tryInit([2, 2], { overrides })
      expect(replies.map(({ error }) => error?.code)).toEqual(Array(4).fill('MPI_MACHINES'))
    })

    test('another token', async () => {
      const overrides = (rank: number) => ({ timeoutMs: 6_000, ...(rank === 3 ? { token: 'guessed' } : {}) })
      const replies = await ranks.tryInit([2, 2], { overrides })
      for (const { error } of replies) expect(error?.code).toMatch(/^(RENDEZVOUS_TIMEOUT|RANK_LOST)$/)
    })
  })
})

/** Starts a group in which the process of `rank` looks for a library that does not exist. */
async function tryInitWithout(ranks: Ranks, rank: number): Promise<Reply[]> {
  await ranks.ready()
  await ranks.ask(rank, { do: 'setLibrary', path: '/nowhere/libmpi.so' })
  const replies = await ranks.tryInit([2, 2])
  await ranks.ask(rank, { do: 'setLibrary', path: undefined })
  return replies
}

async function mpiProcessesOf(pid: number): Promise<number[]> {
  const children = ((await readFile(`/proc/${pid}/task/${pid}/children`, 'utf8')).match(/\d+/g) ?? []).map(Number)
  const commands = await Promise.all(children.map((child) => readFile(`/proc/${child}/cmdline`, 'utf8')))
  return children.filter((_, i) => commands[i]?.includes('mpi-process-main'))
}

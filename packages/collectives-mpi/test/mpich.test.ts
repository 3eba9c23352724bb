import { networkInterfaces } from 'node:os'
import { setTimeout } from 'node:timers/promises'
import fc from 'fast-check'
import { afterAll, beforeAll, describe, expect, test } from 'vitest'
import { callOf, firstError, type Layout, type Plan, plans } from './plans.ts'
import { BARRIER, hasMpich, Ranks } from './ranks.ts'

/** Small chunks, so that many calls take several. Those of more than two machines are split above 64 KiB. */
const CHUNK_BYTES = 2 ** 17

/** How long a connection may take to end after `destroy`: CLOSE_MS in src/connection.ts, and some. */
const CONNECTIONS_END_MS = 1_300

const layoutOf = (sizes: readonly number[]): Layout => {
  let next = 0
  return sizes.map((size) => Array.from({ length: size }, () => next++))
}

async function runPlan(ranks: Ranks, plan: Plan): Promise<Uint8Array[][]> {
  return (await ranks.all((rank) => ({ do: 'run', call: callOf(plan, rank) }))) as Uint8Array[][]
}

async function expectRandomCalls(ranks: Ranks, layout: Layout, numRuns: number): Promise<void> {
  const property = fc.asyncProperty(plans(layout.flat().length), async (plan) => {
    const results = await runPlan(ranks, plan)
    expect(firstError(plan, results, layout)).toBeUndefined()
    if (plan.kind !== 'allReduce') return
    for (const tensors of results) expect(tensors.map(toHex)).toEqual(results[0]?.map(toHex))
  })
  await fc.assert(property, { numRuns })
}

const sum: Plan = { kind: 'allReduce', op: 'sum', seed: 5, tensors: [{ dtype: 'float32', shape: [999] }] }

// Four ranks and two MPI processes start for most tests: 2 s on two idle cores, much more on busy ones.
const TIMEOUT_MS = 90_000

describe.runIf(hasMpich())('MPICH without a launcher of its own', { timeout: TIMEOUT_MS }, () => {
  let ranks: Ranks
  beforeAll(async () => {
    ranks = new Ranks(4)
    await ranks.ready()
  }, TIMEOUT_MS)
  afterAll(() => ranks[Symbol.asyncDispose]())

  test.each<[string, number[]]>([
    ['four machines with a rank each', [1, 1, 1, 1]],
    ['two machines with two ranks each', [2, 2]],
    ['machines with unlike numbers of ranks', [3, 1]],
    ['three machines', [1, 2, 1]],
  ])('random calls on %s', async (_, sizes) => {
    await ranks.init(sizes, { chunkBytes: CHUNK_BYTES })
    await expectRandomCalls(ranks, layoutOf(sizes), 20)
  })

  test('random calls on machines whose ranks are not in a row', async () => {
    const address = Object.values(networkInterfaces())
      .flat()
      .find((candidate) => candidate?.family === 'IPv4' && !candidate.internal)?.address
    if (address === undefined) {
      // Ranks of different machines must not be told loopback addresses.
      process.stderr.write('\nSKIPPED: this machine has no network address but loopback.\n\n')
      return
    }
    const places = [0, 0, 1, 1].map((localRank) => ({ localRank, localWorldSize: 2, masterAddr: address }))
    const overrides = (rank: number) => places[rank] as (typeof places)[number]
    await ranks.init([2, 2], { chunkBytes: CHUNK_BYTES, machines: ['a', 'b', 'a', 'b'], overrides })
    await expectRandomCalls(
      ranks,
      [
        [0, 2],
        [1, 3],
      ],
      15,
    )
  })

  test('the comparison finds a sum in another order', async () => {
    await ranks.init([2, 2])
    const results = await runPlan(ranks, sum)
    expect(firstError(sum, results, layoutOf([2, 2]))).toBeUndefined()
    for (const other of [
      [[0], [1], [2], [3]],
      [
        [0, 2],
        [1, 3],
      ],
      [[0, 1], [2]],
    ]) {
      expect(firstError(sum, results, other)).toBeDefined()
    }
  })

  test('a tensor larger than a chunk, of odd size', async () => {
    await ranks.init([2, 2])
    const plan: Plan = { kind: 'allReduce', seed: 3, tensors: [{ dtype: 'float32', shape: [1_050_003] }] }
    expect(firstError(plan, await runPlan(ranks, plan), layoutOf([2, 2]))).toBeUndefined()
  })

  test('ranks that are all on one machine need no MPI', async () => {
    await ranks.init([4])
    expect(await ranks.all(() => ({ do: 'held' }))).toMatchObject(Array(4).fill({ children: 0 }))
    expect(firstError(sum, await runPlan(ranks, sum), layoutOf([4]))).toBeUndefined()
  })

  test('destroy frees descriptors, memory and processes, and a new group can follow', async () => {
    await ranks.init([2, 2])
    await ranks.all(() => ({ do: 'destroy' }))
    await setTimeout(CONNECTIONS_END_MS)
    const before = await ranks.all(() => ({ do: 'held' }))
    await ranks.init([2, 2])
    await runPlan(ranks, sum)
    const during = await ranks.all(() => ({ do: 'held' }))
    expect(during).toMatchObject([1, 0, 1, 0].map((children) => ({ children, mappings: 1 + children })))
    await ranks.all(() => ({ do: 'destroy' }))
    await setTimeout(CONNECTIONS_END_MS)
    const after = await ranks.all(() => ({ do: 'held' }))
    expect(after).toMatchObject(Array(4).fill({ children: 0, mappings: 0 }))
    expect(after).toEqual(before)
    expect((await ranks.ask(0, { do: 'run', call: BARRIER })).error?.code).toBe('COLLECTIVES_DESTROYED')
  })

  test('a process ends by itself, with and without destroy', async () => {
    await ranks.init([2, 2])
    await runPlan(ranks, sum)
    for (const process of ranks.processes) void process.ask({ do: 'finish' })
    const exits = await Promise.all(ranks.processes.map(({ exited }) => exited))
    expect(exits).toEqual(Array(4).fill({ code: 0, signal: null }))
    await ranks.init([2, 2])
    await ranks.all(() => ({ do: 'destroy' }))
    for (const process of ranks.processes) void process.ask({ do: 'finish' })
    expect(await Promise.all(ranks.processes.map(({ exited }) => exited))).toEqual(exits)
  })
})

function toHex(bytes: Uint8Array): string {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString('hex')
}

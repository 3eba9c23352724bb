import { afterAll, beforeAll, describe, expect, test } from 'vitest'
import type { KernelName, TransportName } from '../src/index.ts'
import { builtAddon } from './built-addon.ts'
import { callOf, errorOn, type Plan } from './plans.ts'
import { BARRIER, type Call, Ranks } from './ranks.ts'

/** Random calls of every group of ranks and kernel. */
const CALLS = Number(process.env.RANKWISE_RANDOM_CALLS ?? 2_000)

/** The first place where a rank holds something else than it must. */
function firstError(
  plan: Plan,
  results: readonly (readonly Uint8Array[])[],
  order: readonly number[],
): string | undefined {
  return results.map((tensors, rank) => errorOn(plan, rank, tensors, order)).find((error) => error !== undefined)
}

async function runPlan(ranks: Ranks, plan: Plan): Promise<Uint8Array[][]> {
  return (await ranks.all((rank) => ({ do: 'run', call: callOf(plan, rank) }))) as Uint8Array[][]
}

const KERNELS: readonly KernelName[] = ['native', 'wasm', 'js']

describe.each([2, 3, 4])('%i ranks', (worldSize) => {
  let ranks: Ranks
  beforeAll(async () => {
    ranks = new Ranks(worldSize)
  })
  afterAll(() => ranks[Symbol.asyncDispose]())

  // Some cases have another kernel on every rank: they follow one protocol.
  const cases: [TransportName, readonly KernelName[]][] = [
    ['shm', ['native']],
    ['shm', ['wasm']],
    ['shm', ['js']],
    ['shm', KERNELS],
    ['tcp', builtAddon() === undefined ? ['wasm', 'js'] : KERNELS],
  ]
  describe.each(cases)('%s, %s', (transport, kernels) => {
    const count = transport === 'shm' && kernels.length > 1 ? CALLS / 4 : CALLS
    const untestable = kernels.includes('native') && builtAddon() === undefined
    test.skipIf(untestable)(
      `${count} random calls in several groups, in and out of shared memory`,
      async () => {
        await ranks.init({ transport, slotBytes: 2048 - (2048 % (64 * worldSize)) }, (rank) => ({
          kernel: kernels[rank % kernels.length] as KernelName,
        }))
        const errors = await ranks.all(() => ({ do: 'random', seed: 17 * worldSize, count }))
        expect(errors).toEqual(Array(worldSize).fill(undefined))
      },
      120_000,
    )
  })
})

describe.each<TransportName>(['shm', 'tcp'])('one group over %s', (transport) => {
  const order = [0, 1, 2]
  const mappings = transport === 'shm' ? 1 : 0
  let ranks: Ranks
  beforeAll(async () => {
    ranks = new Ranks(3)
    await ranks.init({ transport })
  })
  afterAll(() => ranks[Symbol.asyncDispose]())

  const sum: Plan = { kind: 'allReduce', op: 'sum', seed: 5, tensors: [{ dtype: 'float32', shape: [999] }] }

  test('the comparison finds a result in another order of the ranks', async () => {
    const results = await runPlan(ranks, sum)
    expect(firstError(sum, results, order)).toBeUndefined()
    expect(firstError(sum, results, [2, 1, 0])).toBeDefined()
  })

  test('the comparison finds a skipped rank', async () => {
    const results = await runPlan(ranks, sum)
    expect(firstError(sum, results, [0, 1])).toBeDefined()
  })

  test('a tensor larger than the default slot, of odd size', async () => {
    const plan: Plan = { kind: 'allReduce', seed: 3, tensors: [{ dtype: 'float32', shape: [1_050_003] }] }
    expect(firstError(plan, await runPlan(ranks, plan), order)).toBeUndefined()
  })

  test('calls that are not waited for run in order', async () => {
    const all: Plan[] = Array.from({ length: 20 }, (_, seed) => ({ ...sum, seed }))
    const replies = await ranks.all((rank) => ({ do: 'runAll', calls: all.map((plan) => callOf(plan, rank)) }))
    for (const [i, plan] of all.entries()) {
      const results = (replies as Uint8Array[][][]).map((calls) => calls[i] as Uint8Array[])
      expect(firstError(plan, results, order)).toBeUndefined()
    }
  })

  test('a rank that comes late is waited for', async () => {
    const late = ranks.ask(1, { do: 'block', ms: 300 })
    await ranks.all(() => ({ do: 'run', call: BARRIER }))
    expect((await late).error).toBeUndefined()
  })

  test('a call that is refused on every rank does no harm', async () => {
    const bytes = new Uint8Array(8)
    const call: Call = { kind: 'allReduce', tensors: [{ dtype: 'int64', shape: [1], bytes }] }
    const replies = await ranks.settle(() => ({ do: 'run', call }))
    expect(replies.map(({ error }) => error?.code)).toEqual(Array(3).fill('COLLECTIVE_DTYPE'))
    expect(firstError(sum, await runPlan(ranks, sum), order)).toBeUndefined()
  })

  test('destroy frees every descriptor and mapping, and a new group can follow', async () => {
    await ranks.all(() => ({ do: 'destroy' }))
    const before = await ranks.all(() => ({ do: 'held' }))
    for (let i = 0; i < 3; i++) {
      await ranks.init({ transport })
      await runPlan(ranks, sum)
      expect(await ranks.all(() => ({ do: 'held' }))).toMatchObject(Array(3).fill({ mappings }))
      await ranks.all(() => ({ do: 'destroy' }))
    }
    const after = await ranks.all(() => ({ do: 'held' }))
    expect(after).toMatchObject(Array(3).fill({ mappings: 0 }))
    expect(after).toEqual(before)
  })

  test('operations after destroy say so', async () => {
    const { error } = await ranks.ask(0, { do: 'run', call: BARRIER })
    expect(error?.code).toBe('COLLECTIVES_DESTROYED')
  })

  test('a process ends by itself, with and without destroy', async () => {
    await ranks.init({ transport })
    await runPlan(ranks, sum)
    await ranks.ask(0, { do: 'destroy' })
    for (const process of ranks.processes) void process.ask({ do: 'finish' })
    const exits = await Promise.all(ranks.processes.map(({ exited }) => exited))
    expect(exits).toEqual(Array(3).fill({ code: 0, signal: null }))
  })
})

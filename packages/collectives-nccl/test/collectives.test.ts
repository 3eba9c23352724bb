import type { DType, ReduceOp } from '@rankwise/core'
import fc from 'fast-check'
import { afterAll, beforeAll, describe, expect, test } from 'vitest'
import { firstDifference, REDUCIBLE, randomBytes, reduceSequentially } from './oracle.ts'
import { BARRIER, type Call, Ranks, type TensorBytes } from './ranks.ts'
import { leaks, NO_COMPILER } from './stub.ts'

const DTYPES: readonly DType[] = [...REDUCIBLE, 'int16', 'bool']

/** A call without its data, which differs from rank to rank. */
interface Plan {
  readonly kind: Call['kind']
  readonly tensors: readonly { readonly dtype: DType; readonly shape: readonly number[] }[]
  readonly op?: ReduceOp
  readonly source?: number
  readonly onDevice?: boolean
  readonly seed: number
}

const elementsOf = (shape: readonly number[]) => shape.reduce((a, b) => a * b, 1)

function callOf({ tensors, seed, ...plan }: Plan, rank: number): Call {
  return {
    ...plan,
    tensors: tensors.map(({ dtype, shape }, i): TensorBytes => {
      return { dtype, shape, bytes: randomBytes(dtype, elementsOf(shape), seed + 1000 * rank + i) }
    }),
  }
}

/** What `rank` must hold after the call, computed from the data of all ranks in the order given. */
function expectedOn(plan: Plan, rank: number, order: readonly number[]): Uint8Array[] {
  const inputs = order.map((r) => callOf(plan, r).tensors.map(({ bytes }) => bytes))
  const { kind, op = 'sum', source = 0 } = plan
  return plan.tensors.map(({ dtype }, i) => {
    const parts = inputs.map((tensors) => tensors[i] as Uint8Array)
    if (kind === 'allGather') return new Uint8Array(Buffer.concat(parts))
    if (kind === 'broadcast') return parts[source] as Uint8Array
    const reduced = reduceSequentially(dtype, op, parts)
    if (kind === 'allReduce') return reduced
    const share = reduced.length / order.length
    return reduced.slice(rank * share, (rank + 1) * share)
  })
}

/** The first place where a rank holds something else than it must. */
function firstError(
  plan: Plan,
  results: readonly (readonly Uint8Array[])[],
  order: readonly number[],
): string | undefined {
  for (const [rank, tensors] of results.entries()) {
    const expected = expectedOn(plan, rank, order)
    for (const [i, bytes] of tensors.entries()) {
      const { dtype } = plan.tensors[i] as { dtype: DType }
      const index = firstDifference(dtype, bytes, expected[i] as Uint8Array)
      if (index !== undefined) return `rank ${rank}, tensor ${i}, element ${index}`
    }
  }
  return undefined
}

async function runPlan(ranks: Ranks, plan: Plan): Promise<Uint8Array[][]> {
  return (await ranks.all((rank) => ({ do: 'run', call: callOf(plan, rank) }))) as Uint8Array[][]
}

function plans(worldSize: number): fc.Arbitrary<Plan> {
  const common = { seed: fc.nat(1e6), onDevice: fc.boolean() }
  const op = fc.constantFrom<ReduceOp>('sum', 'max', 'min')
  const reducible = fc.constantFrom(...REDUCIBLE)
  const tensor = fc.record({ dtype: reducible, shape: fc.tuple(fc.integer({ min: 0, max: 1500 })) })
  const rows = fc.tuple(fc.integer({ min: 0, max: 5 }), fc.integer({ min: 1, max: 300 }))
  const scattered = rows.map(([count, width]) => [count * worldSize, width])
  const any = fc.record({ dtype: fc.constantFrom(...DTYPES), shape: rows })
  return fc.oneof(
    fc.record({ ...common, kind: fc.constant('allReduce' as const), op, tensors: fc.array(tensor, { maxLength: 4 }) }),
    fc.record({
      ...common,
      kind: fc.constant('reduceScatter' as const),
      op,
      tensors: fc.tuple(fc.record({ dtype: reducible, shape: scattered })),
    }),
    fc.record({ ...common, kind: fc.constant('allGather' as const), tensors: fc.tuple(any) }),
    fc.record({
      ...common,
      kind: fc.constant('broadcast' as const),
      source: fc.nat(worldSize - 1),
      tensors: fc.tuple(any),
    }),
    fc.record({ kind: fc.constant('barrier' as const), seed: fc.constant(0), tensors: fc.constant([]) }),
  )
}

/** No rank did what the real libraries would have let crash or hang. */
function expectNoViolation(ranks: Ranks): void {
  for (const rank of ranks.processes.keys()) {
    expect(ranks.calls(rank).filter((line) => line.startsWith('VIOLATION'))).toEqual([])
  }
}

describe.skipIf(NO_COMPILER !== undefined).each([1, 2, 4])('%i ranks', (worldSize) => {
  const order = Array.from({ length: worldSize }, (_, rank) => rank)
  let ranks: Ranks
  beforeAll(() => {
    ranks = new Ranks(worldSize)
  })
  afterAll(() => ranks?.[Symbol.asyncDispose]())

  test('random operations, on host and device, many of them larger than a slot', async () => {
    await ranks.init({ stagingBytes: 1024 })
    const property = fc.asyncProperty(plans(worldSize), async (plan) => {
      expect(firstError(plan, await runPlan(ranks, plan), order)).toBeUndefined()
    })
    await fc.assert(property, { numRuns: 40 })
    await ranks.all(() => ({ do: 'destroy' }))
    expectNoViolation(ranks)
    for (const rank of order) expect(leaks(ranks.calls(rank))).toEqual({})
  })
})

describe.skipIf(NO_COMPILER !== undefined)('one group', () => {
  const order = [0, 1]
  let ranks: Ranks
  beforeAll(() => {
    ranks = new Ranks(2)
  })
  afterAll(() => ranks?.[Symbol.asyncDispose]())

  const sum: Plan = { kind: 'allReduce', op: 'sum', seed: 5, tensors: [{ dtype: 'float32', shape: [999] }] }

  test('the comparison finds a skipped rank and a wrong source', async () => {
    await ranks.init()
    expect(firstError(sum, await runPlan(ranks, sum), order)).toBeUndefined()
    expect(firstError(sum, await runPlan(ranks, sum), [0])).toBeDefined()
    const broadcast: Plan = { ...sum, kind: 'broadcast', source: 1 }
    expect(firstError({ ...broadcast, source: 0 }, await runPlan(ranks, broadcast), order)).toBeDefined()
    await ranks.inject(1, 'skip-rank')
    expect(firstError(sum, await runPlan(ranks, sum), order)).toBe('rank 1, tensor 0, element 0')
  })

  test('a tensor larger than both slots, of odd size, in pieces that overlap', async () => {
    await ranks.init({ stagingBytes: 2 ** 20 })
    const plan: Plan = { kind: 'allReduce', seed: 3, tensors: [{ dtype: 'float32', shape: [1_050_003] }] }
    expect(firstError(plan, await runPlan(ranks, plan), order)).toBeUndefined()
    const reductions = ranks.calls(0).filter((line) => line.startsWith('ncclAllReduce'))
    expect(reductions).toHaveLength(5)
  })

  test('calls that are not waited for run in order', async () => {
    await ranks.init()
    const all: Plan[] = Array.from({ length: 12 }, (_, seed) => ({ ...sum, seed, onDevice: seed % 2 === 1 }))
    const replies = await ranks.all((rank) => ({ do: 'runAll', calls: all.map((plan) => callOf(plan, rank)) }))
    for (const [i, plan] of all.entries()) {
      const results = (replies as Uint8Array[][][]).map((calls) => calls[i] as Uint8Array[])
      expect(firstError(plan, results, order)).toBeUndefined()
    }
    expectNoViolation(ranks)
  })

  test('an operation on the device waits for what the stream of the caller does before', async () => {
    await ranks.init()
    await ranks.ask(1, { do: 'env', env: { STUB_DEFAULT_STREAM_MS: '300' } })
    const started = performance.now()
    await runPlan(ranks, { ...sum, onDevice: true })
    expect(performance.now() - started).toBeGreaterThan(290)
  })

  test('a rank that comes late is waited for', async () => {
    await ranks.init()
    const late = ranks.ask(1, { do: 'block', ms: 300 })
    await ranks.all(() => ({ do: 'run', call: BARRIER }))
    expect((await late).error).toBeUndefined()
  })

  test('what is compared is what checkFirst says; barriers always are', async () => {
    await ranks.init({ checkFirst: 1 })
    for (let i = 0; i < 3; i++) expect(firstError(sum, await runPlan(ranks, sum), order)).toBeUndefined()
    await ranks.all(() => ({ do: 'run', call: BARRIER }))
    const gathers = ranks.calls(0).filter((line) => line.startsWith('ncclAllGather'))
    expect(gathers).toHaveLength(2)
  })

  test.each(['int16', 'bool'] as const)(
    'a reduction of %s is refused on every rank and does no harm',
    async (dtype) => {
      await ranks.init()
      const call: Call = {
        kind: 'allReduce',
        tensors: [{ dtype, shape: [2], bytes: new Uint8Array(4).subarray(0, dtype === 'bool' ? 2 : 4) }],
      }
      const replies = await ranks.settle(() => ({ do: 'run', call }))
      expect(replies.map(({ error }) => error?.code)).toEqual(['COLLECTIVE_DTYPE', 'COLLECTIVE_DTYPE'])
      expect(firstError(sum, await runPlan(ranks, sum), order)).toBeUndefined()
    },
  )

  test('destroy finalizes, then frees everything; a new group can follow on one store', async () => {
    await ranks.ready()
    const before = (await ranks.all(() => ({ do: 'held' }))) as { descriptors: number; threads: number }[]
    for (let i = 0; i < 3; i++) {
      await ranks.init()
      await runPlan(ranks, sum)
      await ranks.all(() => ({ do: 'destroy' }))
      for (const rank of order) {
        const calls = ranks.calls(rank)
        expect(leaks(calls)).toEqual({})
        expect(calls).toContain('ncclCommDestroy finalized=1')
        expect(calls).not.toContain('ncclCommAbort')
      }
    }
    const after = (await ranks.all(() => ({ do: 'held' }))) as { descriptors: number; threads: number }[]
    expect(after).toMatchObject([{ shared: 0 }, { shared: 0 }])
    // The first group started threads of koffi and of Node's pool; the stub's own are gone.
    for (const [rank, { descriptors }] of after.entries()) expect(descriptors).toBe(before[rank]?.descriptors)
  })

  test('operations after destroy say so', async () => {
    await ranks.init()
    const pending = ranks.ask(0, { do: 'runAll', calls: [BARRIER] })
    await ranks.all((rank) => (rank === 0 ? { do: 'destroy' } : { do: 'held' }))
    expect((await pending).error?.code).toBe('COLLECTIVES_DESTROYED')
  })

  test('a process ends by itself, with and without destroy', async () => {
    await ranks.init()
    await runPlan(ranks, sum)
    await ranks.ask(0, { do: 'destroy' })
    for (const process of ranks.processes) void process.ask({ do: 'finish' })
    const exits = await Promise.all(ranks.processes.map(({ exited }) => exited))
    expect(exits).toEqual(Array(2).fill({ code: 0, signal: null }))
  })
})

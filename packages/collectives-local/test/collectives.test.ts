import type { DType, ReduceOp } from '@rankwise/core'
import fc from 'fast-check'
import { afterAll, beforeAll, describe, expect, test } from 'vitest'
import { firstDifference, randomBytes, reduceSequentially } from './oracle.ts'
import { BARRIER, type Call, Ranks, type TensorBytes } from './ranks.ts'

const DTYPES: readonly DType[] = [
  'float64',
  'float32',
  'float16',
  'bfloat16',
  'int64',
  'int32',
  'int16',
  'int8',
  'uint8',
  'bool',
]
const REDUCIBLE: readonly DType[] = ['float32', 'float64', 'float16', 'bfloat16', 'int32']

/** A call without its data, which differs from rank to rank. */
interface Plan {
  readonly kind: Call['kind']
  readonly tensors: readonly { readonly dtype: DType; readonly shape: readonly number[] }[]
  readonly op?: ReduceOp
  readonly source?: number
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
    return reduced.subarray(rank * share, (rank + 1) * share)
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
  const seed = fc.nat(1e6)
  const op = fc.constantFrom<ReduceOp>('sum', 'max', 'min')
  const size = fc.integer({ min: 0, max: 1500 })
  const reducible = fc.constantFrom(...REDUCIBLE)
  const tensor = fc.record({ dtype: reducible, shape: fc.tuple(size) })
  const rows = fc.tuple(fc.integer({ min: 0, max: 5 }), fc.integer({ min: 1, max: 300 }))
  const scattered = rows.map(([count, width]) => [count * worldSize, width])
  const any = fc.record({ dtype: fc.constantFrom(...DTYPES), shape: rows })
  return fc.oneof(
    fc.record({ kind: fc.constant('allReduce' as const), op, seed, tensors: fc.array(tensor, { maxLength: 4 }) }),
    fc.record({
      kind: fc.constant('reduceScatter' as const),
      op,
      seed,
      tensors: fc.tuple(fc.record({ dtype: reducible, shape: scattered })),
    }),
    fc.record({ kind: fc.constant('allGather' as const), seed, tensors: fc.tuple(any) }),
    fc.record({
      kind: fc.constant('broadcast' as const),
      source: fc.nat(worldSize - 1),
      seed,
      tensors: fc.tuple(any),
    }),
    fc.record({ kind: fc.constant('barrier' as const), seed, tensors: fc.constant([]) }),
  )
}

describe.each([2, 3, 4])('%i ranks', (worldSize) => {
  const order = Array.from({ length: worldSize }, (_, rank) => rank)
  let ranks: Ranks
  beforeAll(() => {
    ranks = new Ranks(worldSize)
  })
  afterAll(() => ranks[Symbol.asyncDispose]())

  test('random operations, many of them larger than a slot', async () => {
    await ranks.init({ slotBytes: 64 * 3 * 4 })
    const property = fc.asyncProperty(plans(worldSize), async (plan) => {
      const results = await runPlan(ranks, plan)
      expect(firstError(plan, results, order)).toBeUndefined()
      if (plan.kind !== 'allReduce') return
      for (const tensors of results) expect(tensors.map(toHex)).toEqual(results[0]?.map(toHex))
    })
    await fc.assert(property, { numRuns: 100 })
    await ranks.all(() => ({ do: 'destroy' }))
  })
})

describe('one group', () => {
  const order = [0, 1, 2]
  let ranks: Ranks
  beforeAll(async () => {
    ranks = new Ranks(3)
    await ranks.init()
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
      await ranks.init()
      await runPlan(ranks, sum)
      expect(await ranks.all(() => ({ do: 'held' }))).toMatchObject(Array(3).fill({ mappings: 1 }))
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
    await ranks.init()
    await runPlan(ranks, sum)
    await ranks.ask(0, { do: 'destroy' })
    for (const process of ranks.processes) void process.ask({ do: 'finish' })
    const exits = await Promise.all(ranks.processes.map(({ exited }) => exited))
    expect(exits).toEqual(Array(3).fill({ code: 0, signal: null }))
  })
})

function toHex(bytes: Uint8Array): string {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString('hex')
}

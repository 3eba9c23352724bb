import type { DType, ReduceOp } from '@rankwise/core'
import fc from 'fast-check'
import { firstDifference, randomBytes, reduceInOrder } from '../../collectives-local/test/oracle.ts'
import type { Call, TensorBytes } from './ranks.ts'

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
export interface Plan {
  readonly kind: Call['kind']
  readonly tensors: readonly { readonly dtype: DType; readonly shape: readonly number[] }[]
  readonly op?: ReduceOp
  readonly source?: number
  readonly seed: number
}

/** The ranks of each machine, in the order in which they are added. */
export type Layout = readonly (readonly number[])[]

const elementsOf = (shape: readonly number[]) => shape.reduce((a, b) => a * b, 1)

export function callOf({ tensors, seed, ...plan }: Plan, rank: number): Call {
  return {
    ...plan,
    tensors: tensors.map(({ dtype, shape }, i): TensorBytes => {
      return { dtype, shape, bytes: randomBytes(dtype, elementsOf(shape), seed + 1000 * rank + i) }
    }),
  }
}

/** What `rank` must hold after the call: sums machine by machine, and then over the machines. */
function expectedOn(plan: Plan, rank: number, layout: Layout): Uint8Array[] {
  const ranks = layout.flat().toSorted((a, b) => a - b)
  const { kind, op = 'sum', source = 0 } = plan
  return plan.tensors.map(({ dtype }, i) => {
    const part = (r: number) => callOf(plan, r).tensors[i]?.bytes as Uint8Array
    if (kind === 'allGather') return new Uint8Array(Buffer.concat(ranks.map(part)))
    if (kind === 'broadcast') return part(source)
    const machines = layout.map((members) => reduceInOrder(dtype, op, members.map(part)))
    const reduced = reduceInOrder(dtype, op, machines)
    if (kind === 'allReduce') return reduced
    const share = reduced.length / ranks.length
    return reduced.subarray(rank * share, (rank + 1) * share)
  })
}

/** The first place where a rank holds something else than it must. */
export function firstError(
  plan: Plan,
  results: readonly (readonly Uint8Array[])[],
  layout: Layout,
): string | undefined {
  for (const [rank, tensors] of results.entries()) {
    const expected = expectedOn(plan, rank, layout)
    if (tensors.length !== expected.length) return `rank ${rank} has ${tensors.length} tensors`
    for (const [i, bytes] of tensors.entries()) {
      const index = firstDifference(plan.tensors[i]?.dtype as DType, bytes, expected[i] as Uint8Array)
      if (index !== undefined) return `rank ${rank}, tensor ${i}, element ${index}`
    }
  }
  return undefined
}

/** Random calls, many of them of several chunks of 64 KiB. */
export function plans(worldSize: number): fc.Arbitrary<Plan> {
  const seed = fc.nat(1e6)
  const op = fc.constantFrom<ReduceOp>('sum', 'max', 'min')
  const size = fc.oneof(fc.integer({ min: 0, max: 500 }), fc.integer({ min: 0, max: 40_000 }))
  const reducible = fc.constantFrom(...REDUCIBLE)
  const tensor = fc.record({ dtype: reducible, shape: fc.tuple(size) })
  const rows = fc.tuple(fc.integer({ min: 0, max: 5 }), fc.integer({ min: 1, max: 5_000 }))
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
    fc.record({ kind: fc.constant('broadcast' as const), source: fc.nat(worldSize - 1), seed, tensors: fc.tuple(any) }),
    fc.record({ kind: fc.constant('barrier' as const), seed, tensors: fc.constant([]) }),
  )
}

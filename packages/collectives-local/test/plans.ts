import type { DType, ReduceOp } from '@rankwise/core'
import { firstDifference, randomBytes, reduceInOrder } from './oracle.ts'
import type { Call, TensorBytes } from './ranks.ts'

/** A call without its data, which differs from rank to rank. */
export interface Plan {
  readonly kind: Call['kind']
  readonly tensors: readonly { readonly dtype: DType; readonly shape: readonly number[] }[]
  readonly op?: ReduceOp
  readonly source?: number
  readonly seed: number
}

const elementsOf = (shape: readonly number[]) => shape.reduce((a, b) => a * b, 1)

/** What `rank` calls. */
export function callOf({ tensors, seed, ...plan }: Plan, rank: number): Call {
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
    const reduced = reduceInOrder(dtype, op, parts)
    if (kind === 'allReduce') return reduced
    const share = reduced.length / order.length
    return reduced.subarray(rank * share, (rank + 1) * share)
  })
}

/** The first place where `rank` holds something else than it must. */
export function errorOn(
  plan: Plan,
  rank: number,
  tensors: readonly Uint8Array[],
  order: readonly number[],
): string | undefined {
  const expected = expectedOn(plan, rank, order)
  for (const [i, bytes] of tensors.entries()) {
    const { dtype } = plan.tensors[i] as { dtype: DType }
    const index = firstDifference(dtype, bytes, expected[i] as Uint8Array)
    if (index !== undefined) return `rank ${rank}, tensor ${i}, element ${index} after ${JSON.stringify(plan)}`
  }
  return undefined
}

import type { DType, ReduceOp } from '@rankwise/core'
import { xorshift } from './oracle.ts'
import type { Plan } from './plans.ts'

const REDUCIBLE: readonly DType[] = ['float32', 'float64', 'float16', 'bfloat16', 'int32']
const DTYPES: readonly DType[] = [...REDUCIBLE, 'int64', 'int16', 'int8', 'uint8', 'bool']
const OPS: readonly ReduceOp[] = ['sum', 'max', 'min']
/** Sizes that protocols stumble over, for slots of 2 KiB: nothing, one, odd, around a cache line and around a slot. */
const SIZES = [0, 1, 2, 3, 15, 16, 17, 511, 512, 513, 1023, 1025, 2047, 4099]

/** A random call: which group makes it, and where its tensors lie. */
export interface RandomPlan extends Plan {
  /** Number that the group, of those that exist, is chosen by. */
  readonly group: number
  /** Whether the tensors of an all-reduce lie in shared memory. */
  readonly shared: boolean
}

/** Calls that are the same on every rank, for the same seed. */
export function* randomPlans(seed: number, count: number, worldSizes: readonly number[]): Generator<RandomPlan> {
  const next = xorshift(seed)
  const nat = (limit: number) => (next() >>> 0) % limit
  const pick = <T>(values: readonly T[]) => values[nat(values.length)] as T
  const size = () => (nat(2) === 0 ? pick(SIZES) : nat(1500))
  for (let i = 0; i < count; i++) {
    const group = nat(worldSizes.length)
    const worldSize = worldSizes[group] as number
    const shared = nat(4) === 0
    // What lies in shared memory is reduced in place only from 64 KiB on.
    const tensor = (dtype: DType) => ({ dtype, shape: [shared && nat(4) === 0 ? 16_400 + nat(200) : size()] })
    const kinds = [
      (): Omit<Plan, 'seed'> => ({
        kind: 'allReduce',
        op: pick(OPS),
        tensors: Array.from({ length: nat(4) }, () => tensor(pick(REDUCIBLE))),
      }),
      (): Omit<Plan, 'seed'> => ({
        kind: 'reduceScatter',
        op: pick(OPS),
        tensors: [{ dtype: pick(REDUCIBLE), shape: [nat(5) * worldSize, 1 + nat(300)] }],
      }),
      (): Omit<Plan, 'seed'> => ({ kind: 'allGather', tensors: [{ dtype: pick(DTYPES), shape: [size()] }] }),
      (): Omit<Plan, 'seed'> => ({
        kind: 'broadcast',
        source: nat(worldSize),
        tensors: [{ dtype: pick(DTYPES), shape: [size()] }],
      }),
      (): Omit<Plan, 'seed'> => ({ kind: 'barrier', tensors: [] }),
    ]
    // Half of the calls are all-reduces, as in use.
    const plan = (nat(2) === 0 ? kinds[0] : pick(kinds)) as () => Omit<Plan, 'seed'>
    yield { ...plan(), seed: nat(1e6), group, shared }
  }
}

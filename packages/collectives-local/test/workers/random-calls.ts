import { Tensor, viewAs } from '@rankwise/core'
import type { LocalGroup, SharedTensor } from '../../src/index.ts'
import { callOf, errorOn } from '../plans.ts'
import { type RandomPlan, randomPlans } from '../random-plan.ts'
import { runCall } from './run-call.ts'

/** Room for three tensors of the largest size and dtype. */
const SHARED_BYTES = 400_000

/** A group that this rank is in, with shared memory to take tensors from; undefined where it is not in it. */
interface Place {
  readonly group: LocalGroup
  readonly shared: SharedTensor<'uint8'>
}

/**
 * Makes random calls, in several groups, and compares every result with the sequential one.
 *
 * @returns the first difference
 */
export async function randomCalls(world: LocalGroup, seed: number, count: number): Promise<string | undefined> {
  const all = Array.from({ length: world.worldSize }, (_, rank) => rank)
  const groups = [all, all.slice(0, 2), all.slice(1), [all.length - 1]]
  const places: (Place | undefined)[] = []
  for (const [i, ranks] of groups.entries()) {
    const group = i === 0 ? world : await world.newGroup(ranks)
    places.push(group && { group, shared: await group.allocate('uint8', [SHARED_BYTES]) })
  }
  const sizes = groups.map(({ length }) => length)
  let first: string | undefined
  try {
    for (const plan of randomPlans(seed, count, sizes)) {
      const place = places[plan.group]
      const error = place && (await compare(place, plan))
      // The other ranks need this one for the calls that follow.
      if (error !== undefined) first ??= `group of ranks ${groups[plan.group]}: ${error}`
    }
    return first
  } finally {
    for (const place of places) if (place !== undefined && place.group !== world) await place.group.destroy()
  }
}

async function compare({ group, shared }: Place, plan: RandomPlan): Promise<string | undefined> {
  const call = callOf(plan, group.rank)
  let end = plan.seed % 4 === 0 ? 0 : 8 * (plan.seed % 100)
  const tensors = call.tensors.map(({ dtype, shape, bytes }) => {
    if (!plan.shared) return new Tensor(dtype, shape, viewAs(dtype, new Uint8Array(bytes)))
    const place = shared.data.subarray(end, end + bytes.length)
    place.set(bytes)
    end += Math.ceil(bytes.length / 8) * 8
    return new Tensor(dtype, shape, viewAs(dtype, place))
  })
  const results = await runCall(group, call, tensors)
  const order = Array.from({ length: group.worldSize }, (_, rank) => rank)
  return errorOn(plan, group.rank, results, order)
}

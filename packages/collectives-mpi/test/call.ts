import { bytesOf, type Collectives, Tensor, viewAs } from '@rankwise/core'
import type { Call } from './ranks.ts'

/** Makes one call; the results are what its tensors hold afterwards, or what it returns. */
export async function callOn(group: Collectives, call: Call, signal?: AbortSignal): Promise<Uint8Array[]> {
  const tensors = call.tensors.map(
    ({ dtype, shape, bytes }) => new Tensor(dtype, shape, viewAs(dtype, new Uint8Array(bytes))),
  )
  const [tensor] = tensors as [Tensor]
  const options = { signal, ...(call.op ? { op: call.op } : {}) }
  if (call.kind === 'allGather') return [bytesOf(await group.allGather(tensor, options))]
  if (call.kind === 'reduceScatter') return [bytesOf(await group.reduceScatter(tensor, options))]
  if (call.kind === 'allReduce') await group.allReduce(tensors, options)
  if (call.kind === 'broadcast') await group.broadcast(tensor, { ...options, source: call.source ?? 0 })
  if (call.kind === 'barrier') await group.barrier(options)
  return tensors.map(bytesOf)
}

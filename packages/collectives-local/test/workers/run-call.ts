import type { Tensor } from '@rankwise/core'
import type { LocalGroup } from '../../src/index.ts'
import type { Call } from '../ranks.ts'

/** Makes a call with these tensors; resolves with the bytes of its results. */
export async function runCall(
  group: LocalGroup,
  { kind, op, source = 0 }: Call,
  tensors: readonly Tensor[],
  signal?: AbortSignal,
): Promise<Uint8Array[]> {
  const [tensor] = tensors as [Tensor]
  const options = { signal, ...(op ? { op } : {}) }
  if (kind === 'allGather') return [bytesOf(await group.allGather(tensor, options))]
  if (kind === 'reduceScatter') return [bytesOf(await group.reduceScatter(tensor, options))]
  if (kind === 'allReduce') await group.allReduce(tensors, options)
  if (kind === 'broadcast') await group.broadcast(tensor, { ...options, source })
  if (kind === 'barrier') await group.barrier(options)
  return tensors.map(bytesOf)
}

function bytesOf({ data }: Tensor): Uint8Array {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
}

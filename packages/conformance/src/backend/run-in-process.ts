import {
  type DeviceTensor,
  type DType,
  GraphExecutor,
  type PlacedGraph,
  type PlacedValue,
  type Tensor,
} from '@rankwise/core'
import { shardTensor } from '@rankwise/core/reference'
import { InProcessGroup } from '../ranks/in-process-group.ts'
import { memorySource } from './memory-source.ts'
import type { BackendSubject } from './options.ts'

/** Tensors by name. */
export type Tensors = Readonly<Record<string, Tensor>>

/**
 * Runs a placed graph on as many backends as it has ranks, all in this process.
 *
 * @param weights - whole weights by name, in the dtype that they are stored in
 * @returns the outputs of every rank
 */
export async function runInProcess(
  { create }: Pick<BackendSubject, 'create'>,
  graph: PlacedGraph,
  weights: Tensors,
  inputs: Tensors,
): Promise<readonly Tensors[]> {
  const group = new InProcessGroup(graph.tpDegree)
  const runs = Array.from({ length: graph.tpDegree }, async (_, rank) => {
    await using backend = await create()
    const collectives = graph.tpDegree === 1 ? undefined : group.member(rank)
    try {
      const loaded = new Map<string, DeviceTensor>()
      for (const value of graph.parameters) {
        const { name = '' } = value
        const shard = localShard(weights[name] as Tensor, value, rank, graph.tpDegree)
        loaded.set(name, await backend.loadShard(memorySource(name, shard), { dtype: value.dtype }))
      }
      const executor = await GraphExecutor.compile(graph, { backend, collectives, weights: loaded })
      const outputs = await executor.run(inputs)
      await executor.dispose()
      for (const weight of loaded.values()) weight.dispose()
      return outputs
    } catch (error) {
      // The other ranks would wait for this one.
      group.fail(() => error as Error)
      throw error
    }
  })
  return Promise.all(runs)
}

/** In the dtype of the whole weight, so that nothing is rounded. */
function localShard(whole: Tensor, { placement }: PlacedValue, rank: number, tpDegree: number): Tensor {
  return shardTensor(whole, placement, rank, tpDegree).cast(whole.dtype as DType)
}

import '../../../collectives-local/src/index.ts'
import { runRank } from '../../../conformance/src/ranks/run-rank.ts'
import { REPLICATED, shardSlices } from '../../src/placement.ts'
import { initProcessGroup } from '../../src/process-group.ts'
import { saveShards } from '../../src/save/index.ts'
import { sliceTensor } from '../../src/slice-tensor.ts'
import type { Tensor } from '../../src/tensor.ts'
import { tinyModel } from '../save/flux2-tiny.ts'

/** What the test asks of every rank. */
export interface SaveOrder {
  readonly directory: string
  /** What rank 1 does in the middle of the save. @default nothing */
  readonly misfortune?: 'killed' | 'aborted'
}

const HALFWAY = 20

runRank(async ({ directory, misfortune }: SaveOrder) => {
  const { config, tensors, placements } = await tinyModel('flux2-klein-tiny')
  await using group = await initProcessGroup({ backend: 'local', timeoutMs: 20_000 })
  const controller = new AbortController()
  let asked = 0
  await saveShards(directory, {
    component: 'transformer',
    config,
    weightsName: 'diffusion_pytorch_model',
    tensors,
    placements,
    collectives: group.collectives,
    signal: controller.signal,
    read: async (name) => {
      if (group.rank === 1 && ++asked === HALFWAY) {
        if (misfortune === 'killed') process.kill(process.pid, 'SIGKILL')
        if (misfortune === 'aborted') controller.abort(new Error('enough'))
      }
      const placement = placements.get(name)?.placement ?? REPLICATED
      return sliceTensor(tensors.get(name) as Tensor, shardSlices(placement, group.rank, group.worldSize))
    },
  })
  return asked
})

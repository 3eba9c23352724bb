import { writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { expect, it } from 'vitest'
import {
  type Collectives,
  initProcessGroup,
  registerCollectives,
  Tensor,
  TensorParallelConfig,
  writeSafetensors,
} from '../src/index.ts'
import { ReferenceBackend } from '../src/reference/index.ts'
import { temporaryFolder } from './checkpoint/files.ts'
import { Mlp, mlpWeights } from './mlp-model.ts'

/** Rank 0 of two, of which the other does the same; counts the exchanges that are under way at once. */
class EchoCollectives implements Partial<Collectives> {
  readonly rank = 0
  readonly worldSize = 2
  most = 0
  #underWay = 0

  async allReduce(): Promise<void> {
    this.#underWay++
    this.most = Math.max(this.most, this.#underWay)
    await new Promise((resolve) => setTimeout(resolve, 20))
    this.#underWay--
  }

  async allGather({ dtype, shape, data }: Tensor): Promise<Tensor> {
    const bytes = data as Uint8Array
    return new Tensor(dtype, [(shape[0] as number) * 2], Uint8Array.from([...bytes, ...bytes]))
  }

  async destroy(): Promise<void> {}
}

it('runs of split models of one group never exchange at once', async () => {
  const folder = await temporaryFolder()
  await writeFile(join(folder, 'config.json'), '{}')
  await writeSafetensors(join(folder, 'diffusion_pytorch_model.safetensors'), mlpWeights())
  const collectives = new EchoCollectives()
  registerCollectives('echo', async () => collectives as unknown as Collectives)
  const env = {
    RANK: '0',
    WORLD_SIZE: '2',
    LOCAL_RANK: '0',
    LOCAL_WORLD_SIZE: '2',
    MASTER_ADDR: '127.0.0.1',
    MASTER_PORT: '1234',
  }
  await using _group = await initProcessGroup({ backend: 'echo', env })
  const options = { backend: new ReferenceBackend(), parallelConfig: new TensorParallelConfig({ tpDegree: 2 }) }
  const models = [await Mlp.fromPretrained(folder, options), await Mlp.fromPretrained(folder, options)]
  const x = Tensor.float32([1, 4], [1, 2, 3, 4])
  await Promise.all(models.flatMap((model) => [model.run(x), model.run(x)]))
  expect(collectives.most).toBe(1)
})

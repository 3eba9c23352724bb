// Start it with: rankwise run --nproc-per-node 2 examples/tensor-parallel-flux2.ts [pipeline folder]
import '@rankwise/collectives-local'
import { ort } from '@rankwise/backend-ort'
import { initProcessGroup, TensorParallelConfig } from '@rankwise/core'
import * as demo from '@rankwise/demo-flux2'
import { Generator } from '@rankwise/diffusion'
import { Flux2KleinPipeline, Flux2Transformer2DModel } from '@rankwise/models-flux2'

const dir = process.argv[2] ?? demo.directory
// The demo was trained for small pictures; other pipelines have the defaults of diffusers.
const options = process.argv[2] === undefined ? demo.callOptions : {}

await using group = await initProcessGroup({ backend: 'local' })
const backend = await ort({ device: 'cpu' })
const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
const transformer = await Flux2Transformer2DModel.fromPretrained(dir, {
  subfolder: 'transformer',
  backend,
  parallelConfig,
})
const pipeline = await Flux2KleinPipeline.fromPretrained(dir, { transformer, backend })
const generator = new Generator().manualSeed(42)
const { images } = await pipeline({ prompt: 'a cat on a blue background', generator, ...options })
if (group.rank === 0) await images[0].save('output.png')

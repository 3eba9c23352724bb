// Start it on each machine with: RANKWISE_TOKEN=<secret> rankwise run --nproc-per-node 2 --nnodes 2 --node-rank <0 or 1>
// --master-addr <address of machine 0> --master-port 29500 examples/several-machines-flux2.ts [picture]
import '@rankwise/collectives-mpi'
import { ort } from '@rankwise/backend-ort'
import { initProcessGroup, TensorParallelConfig } from '@rankwise/core'
import { callOptions, directory } from '@rankwise/demo-flux2'
import { Generator } from '@rankwise/diffusion'
import { Flux2KleinPipeline } from '@rankwise/models-flux2'

await using group = await initProcessGroup({ backend: 'mpi' })
const backend = await ort({ device: 'cpu' })
const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
const pipeline = await Flux2KleinPipeline.fromPretrained(directory, { backend, parallelConfig })
const generator = new Generator().manualSeed(42)
const { images } = await pipeline({ prompt: 'a cat on a blue background', generator, ...callOptions })
console.log(`rank ${group.rank} of ${group.worldSize}, on '${group.collectives.name}' collectives`)
if (group.rank === 0) await images[0].save(process.argv[2] ?? 'output.png')

// One rank of Rankwise: started by main.ts. Rank 0 prints the times of every size as one line of JSON.
import { type Collectives, initProcessGroup, Tensor } from '@rankwise/core'
import { fill, requireSums } from './pattern.ts'
import { hasSharedTensors } from './shared-tensors.ts'

const [backend, memory, ...plans] = process.argv.slice(2) as [string, 'private' | 'arena', ...string[]]

await import(`@rankwise/collectives-${backend}`)
await using group = await initProcessGroup({ backend })
const { collectives } = group
for (const plan of plans) {
  const [bytes, operations, batches] = plan.split(':').map(Number) as [number, number, number]
  const tensor = await newTensor(bytes / Float32Array.BYTES_PER_ELEMENT)
  const microseconds = new Float64Array(batches)
  for (let batch = 0; batch < batches; batch++) {
    fill(tensor.data, group.rank)
    microseconds[batch] = (await reduce(collectives, tensor, operations)) / operations
    requireSums(tensor.data, group.worldSize, operations)
  }
  const slowest = new Tensor('float64', [batches], microseconds)
  await collectives.allReduce([slowest], { op: 'max' })
  if (group.rank === 0) console.log(JSON.stringify({ bytes, microseconds: [...microseconds] }))
}

async function reduce(collectives: Collectives, tensor: Tensor, operations: number): Promise<number> {
  const tensors = [tensor]
  await collectives.barrier()
  const started = performance.now()
  for (let i = 0; i < operations; i++) await collectives.allReduce(tensors)
  return (performance.now() - started) * 1000
}

async function newTensor(elements: number): Promise<Tensor<'float32'>> {
  if (memory === 'private') return Tensor.zeros('float32', [elements])
  if (!hasSharedTensors(collectives)) throw new Error(`${collectives.name} has no tensors in shared memory`)
  return collectives.allocate('float32', [elements])
}

import '@rankwise/collectives-local'
import { initProcessGroup, Tensor } from '@rankwise/core'

await using group = await initProcessGroup({ backend: 'local' })
const tensor = Tensor.float32([2], [group.rank + 1, 10])
await group.collectives.allReduce([tensor])
process.stdout.write(`${process.argv.slice(2).join(' ')} ${tensor.data.join(' ')}\n`)
if (process.argv[2] === 'die' && group.rank === 1) process.kill(process.pid, 'SIGKILL')
if (process.argv[2] === 'die') await group.collectives.barrier()

import '@rankwise/collectives-local'
import { initProcessGroup, Tensor } from '@rankwise/core'

const isFirstAttempt = process.env.TORCHELASTIC_RESTART_COUNT === '0'
const dies = process.argv[2] === 'die' || (process.argv[2] === 'die-once' && isFirstAttempt)
await using group = await initProcessGroup({ backend: 'local' })
const tensor = Tensor.float32([2], [group.rank + 1, 10])
await group.collectives.allReduce([tensor])
process.stdout.write(`${process.argv.slice(2).join(' ')} ${tensor.data.join(' ')}\n`)
if (dies && group.rank === 1) process.kill(process.pid, 'SIGKILL')
if (dies) await group.collectives.barrier()

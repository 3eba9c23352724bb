import { type RankwiseError, rendezvousFromEnv, Tensor } from '@rankwise/core'
import { mpiCollectives } from '../../src/index.ts'

// A rank for scripts/test-netns.mjs: reduces until something fails, and prints what and when. No rank is slow.

const TIMEOUT_MS = 30_000

const group = await mpiCollectives({ ...rendezvousFromEnv(), timeoutMs: TIMEOUT_MS })
const tensor = Tensor.zeros('float32', [250_000])
try {
  for (let i = 0; ; i++) {
    await group.allReduce([tensor])
    if (i === 10 && group.rank === 0) process.stdout.write('running\n')
  }
} catch (error) {
  const { code, actual, message } = error as RankwiseError
  const outcome = { rank: group.rank, code, ranks: actual.ranks, at: Date.now(), message }
  process.stdout.write(`${JSON.stringify(outcome)}\n`)
}
await group.destroy()

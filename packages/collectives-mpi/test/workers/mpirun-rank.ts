import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { setTimeout } from 'node:timers/promises'
import { type RankwiseError, rendezvousFromEnv } from '@rankwise/core'
import { mpiCollectives } from '../../src/index.ts'
import { callOn } from '../call.ts'
import { callOf, type Plan } from '../plans.ts'

// A rank that mpirun starts: what to do comes as an argument, what came of it goes into a file: mpirun mixes
// what the ranks print.

/** Ranks are told that two of them share a machine. */
const PER_MACHINE = 2

const task = JSON.parse(process.argv[2] as string) as { folder: string; plans?: Plan[]; kill?: number }
const { folder, plans = [], kill } = task
const rendezvous = rendezvousFromEnv()
const { rank } = rendezvous
const group = await mpiCollectives(
  { ...rendezvous, localRank: rank % PER_MACHINE, localWorldSize: PER_MACHINE, timeoutMs: 40_000 },
  { chunkBytes: 2 ** 17 },
)

if (kill === undefined) {
  const results: string[][] = []
  for (const plan of plans) {
    const tensors = await callOn(group, callOf(plan, rank))
    results.push(tensors.map((bytes) => Buffer.from(bytes).toString('base64')))
  }
  write({ rank, results })
} else {
  await group.barrier()
  if (rank === kill) {
    await setTimeout(200)
    process.kill(process.pid, 'SIGKILL')
  }
  const { code, actual } = (await group.barrier().catch((error) => error)) as RankwiseError
  write({ rank, code, ranks: actual.ranks })
}
await group.destroy()

/** At once: mpirun may end this process at any moment. */
function write(value: unknown): void {
  writeFileSync(join(folder, `${rank}.json`), JSON.stringify(value))
}

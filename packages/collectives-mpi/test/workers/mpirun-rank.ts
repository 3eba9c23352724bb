import { writeSync } from 'node:fs'
import { setTimeout } from 'node:timers/promises'
import { type RankwiseError, rendezvousFromEnv } from '@rankwise/core'
import { mpiCollectives } from '../../src/index.ts'
import { callOn } from '../call.ts'
import { callOf, type Plan } from '../plans.ts'

// A rank that mpirun starts: what to do comes as an argument, what came of it goes out as one line of JSON.

/** Ranks are told that two of them share a machine. */
const PER_MACHINE = 2

const { plans = [], kill } = JSON.parse(process.argv[2] as string) as { plans?: Plan[]; kill?: number }
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
  print({ rank, results })
} else {
  await group.barrier()
  if (rank === kill) {
    await setTimeout(200)
    process.kill(process.pid, 'SIGKILL')
  }
  const { code, actual } = (await group.barrier().catch((error) => error)) as RankwiseError
  print({ rank, code, ranks: actual.ranks })
}
await group.destroy()

/** At once and whole: mpirun may end this process at any moment. */
function print(value: unknown): void {
  const line = Buffer.from(`${JSON.stringify(value)}\n`)
  for (let written = 0; written < line.length; ) written += writeSync(1, line, written)
}

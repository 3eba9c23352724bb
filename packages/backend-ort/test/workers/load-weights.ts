// Loads the checkpoint in argv[2] with weights kept as argv[3] says, and prints the most anonymous memory that this took; run
// by mapping.test.ts with the garbage collector exposed.
import { readFileSync } from 'node:fs'
import { Checkpoint } from '@rankwise/core'
import { ort, type WeightsMode } from '../../src/index.ts'

const [directory, weights] = process.argv.slice(2) as [string, WeightsMode]

/** Bytes of anonymous memory of this process. */
function anonymousBytes(): number {
  globalThis.gc?.()
  const rollup = readFileSync('/proc/self/smaps_rollup', 'utf8')
  return Number(/^Anonymous:\s+(\d+) kB$/m.exec(rollup)?.[1]) * 1024
}

await using backend = await ort({ device: 'cpu', weights })
await using checkpoint = await Checkpoint.open(directory)
let peak = 0
const before = anonymousBytes()
for (const name of checkpoint.tensors.keys()) {
  await backend.loadShard(checkpoint.source(name), { dtype: 'float32' })
  peak = Math.max(peak, anonymousBytes() - before)
}
const { weightBytes, mappedBytes } = backend.memory()
process.stdout.write(JSON.stringify({ peak, weightBytes, mappedBytes }))

import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { text } from 'node:stream/consumers'
import { fileURLToPath } from 'node:url'
import fc from 'fast-check'
import { describe, expect, test } from 'vitest'
import { firstError, type Plan, plans } from './plans.ts'
import { isInstalled, SOURCES } from './ranks.ts'

const WORKER = fileURLToPath(new URL('workers/mpirun-rank.ts', import.meta.url))
const LAYOUT = [
  [0, 1],
  [2, 3],
]

// Debian installs MPICH's mpirun under this name, too, unless OpenMPI is there.
const MPIRUN = 'mpirun.openmpi'

interface Outcome {
  readonly code: number | null
  readonly stdout: string
  readonly stderr: string
}

/** Runs a worker as four ranks, two on each of two "machines". */
async function mpirun(task: unknown, options: readonly string[] = []): Promise<Outcome> {
  const flags = ['--allow-run-as-root', '--oversubscribe', '-np', '4', ...options]
  const child = spawn(MPIRUN, [...flags, process.execPath, ...SOURCES, WORKER, JSON.stringify(task)])
  const [stdout, stderr, [code]] = await Promise.all([text(child.stdout), text(child.stderr), once(child, 'exit')])
  return { code, stdout, stderr }
}

/** What each rank has printed: one line of JSON. */
function resultsOf({ stdout, stderr }: Outcome): Record<string, unknown>[] {
  const lines = stdout.split('\n').filter((line) => line.startsWith('{'))
  const results = lines.map((line) => JSON.parse(line) as Record<string, unknown>)
  if (results.length === 0) throw new Error(`no rank has printed a result:\n${stdout}${stderr}`)
  return results.sort((a, b) => Number(a.rank) - Number(b.rank))
}

const decode = (encoded: unknown) =>
  (encoded as string[][]).map((tensors) => tensors.map((bytes) => new Uint8Array(Buffer.from(bytes, 'base64'))))

describe.runIf(isInstalled('OpenMPI (Debian: apt-get install openmpi-bin)', MPIRUN, ['--version']))(
  'OpenMPI under its mpirun',
  () => {
    test('random calls on two machines with two ranks each', { timeout: 90_000 }, async () => {
      const calls: Plan[] = fc.sample(plans(4), { numRuns: 30, seed: 1 })
      const outcome = await mpirun({ plans: calls })
      const results = resultsOf(outcome).map(({ results: encoded }) => decode(encoded))
      expect(results).toHaveLength(4)
      for (const [i, plan] of calls.entries()) {
        expect(
          firstError(
            plan,
            results.map((rank) => rank[i] as Uint8Array[]),
            LAYOUT,
          ),
        ).toBeUndefined()
      }
      expect(outcome.code).toBe(0)
    })

    test('survivors name a rank that is killed before mpirun ends them', { timeout: 90_000 }, async () => {
      const outcome = await mpirun({ kill: 2 })
      const results = resultsOf(outcome)
      expect(results.map(({ rank }) => rank)).toEqual([0, 1, 3])
      for (const { code, ranks } of results) expect({ code, ranks }).toEqual({ code: 'RANK_LOST', ranks: [2] })
      expect(outcome.code).not.toBe(0)
    })
  },
)

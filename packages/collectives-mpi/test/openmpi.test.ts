import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { mkdtemp, readdir, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
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
  /** What each rank has written, in rank order. */
  readonly results: readonly Record<string, unknown>[]
}

/** Runs a worker as four ranks, two on each of two "machines". */
async function mpirun(task: object): Promise<Outcome> {
  const folder = await mkdtemp(join(tmpdir(), 'rankwise-mpirun-'))
  try {
    const flags = ['--allow-run-as-root', '--oversubscribe', '-np', '4']
    const args = [...flags, process.execPath, ...SOURCES, WORKER, JSON.stringify({ ...task, folder })]
    const child = spawn(MPIRUN, args, { stdio: ['ignore', 'pipe', 'pipe'] })
    const [stdout, stderr, [code]] = await Promise.all([text(child.stdout), text(child.stderr), once(child, 'exit')])
    const names = (await readdir(folder)).sort()
    if (names.length === 0) throw new Error(`no rank has written a result:\n${stdout}${stderr}`)
    const files = await Promise.all(names.map((name) => readFile(join(folder, name), 'utf8')))
    return { code, results: files.map((file) => JSON.parse(file) as Record<string, unknown>) }
  } finally {
    await rm(folder, { recursive: true, force: true })
  }
}

const decode = (encoded: unknown) =>
  (encoded as string[][]).map((tensors) => tensors.map((bytes) => new Uint8Array(Buffer.from(bytes, 'base64'))))

describe.runIf(isInstalled('OpenMPI (Debian: apt-get install openmpi-bin)', MPIRUN, ['--version']))(
  'OpenMPI under its mpirun',
  () => {
    test('random calls on two machines with two ranks each', { timeout: 90_000 }, async () => {
      const calls: Plan[] = fc.sample(plans(4), { numRuns: 30, seed: 1 })
      const outcome = await mpirun({ plans: calls })
      const results = outcome.results.map(({ results: encoded }) => decode(encoded))
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
      const { code: exitCode, results } = await mpirun({ kill: 2 })
      expect(results.map(({ rank }) => rank)).toEqual([0, 1, 3])
      for (const { code, ranks } of results) expect({ code, ranks }).toEqual({ code: 'RANK_LOST', ranks: [2] })
      expect(exitCode).not.toBe(0)
    })
  },
)

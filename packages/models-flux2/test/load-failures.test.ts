import { cp, mkdtemp, readdir, rm, stat, truncate } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { onRanks, referencePath } from '@rankwise/fixtures'
import { expect, it, onTestFinished } from 'vitest'
import type { LoadEnd, LoadScenario } from './workers/load-failures.ts'

const WORKER = new URL('workers/load-failures.ts', import.meta.url)
const WHOLE = referencePath('flux2-klein-tiny', 'transformer')

/** A copy of the checkpoint, as another machine has one. */
async function copyOf(): Promise<string> {
  const directory = await mkdtemp(join(tmpdir(), 'rankwise-'))
  onTestFinished(() => rm(directory, { recursive: true, force: true }))
  await cp(WHOLE, directory, { recursive: true })
  return directory
}

async function truncated(): Promise<string> {
  const directory = await copyOf()
  const file =
    (await readdir(directory))
      .filter((name) => name.endsWith('.safetensors'))
      .sort()
      .at(-1) ?? ''
  const { size } = await stat(join(directory, file))
  await truncate(join(directory, file), size - 1)
  return directory
}

async function withoutConfig(): Promise<string> {
  const directory = await copyOf()
  await rm(join(directory, 'config.json'))
  return directory
}

/** What rank 0 and rank 1 end with. */
interface Expected {
  readonly what: string
  readonly codes: readonly [string, string]
  /** The rank that fails, for the other. */
  readonly failed?: number
}

it('two ranks load together or not at all, and their group outlives it', async () => {
  const broken = await truncated()
  const unconfigured = await withoutConfig()
  const elsewhere = 'LOAD_FAILED_ELSEWHERE'
  const cases: readonly (Expected & { readonly scenario: LoadScenario })[] = [
    {
      what: 'a truncated file',
      scenario: { directories: [WHOLE, broken], delays: [1000, 0] },
      codes: [elsewhere, 'SAFETENSORS_TRUNCATED'],
      failed: 1,
    },
    {
      what: 'no config',
      scenario: { directories: [unconfigured, WHOLE], delays: [0, 1000] },
      codes: ['CONFIG_NOT_FOUND', elsewhere],
      failed: 0,
    },
    {
      what: 'an abort',
      scenario: { directories: [WHOLE, WHOLE], delays: [1000, 1000], aborts: [undefined, 300] },
      codes: [elsewhere, 'ABORTED'],
      failed: 1,
    },
    {
      what: 'an abort of a rank that waits for the other',
      scenario: { directories: [WHOLE, WHOLE], delays: [0, 1000], aborts: [1000, undefined] },
      codes: ['ABORTED', elsewhere],
      failed: 0,
    },
    { what: 'nothing', scenario: { directories: [WHOLE, WHOLE], delays: [0, 5] }, codes: ['LOADED', 'LOADED'] },
  ]
  const ranks = await onRanks<readonly LoadEnd[]>(
    2,
    WORKER,
    cases.map(({ scenario }) => scenario),
  )
  for (const [i, { what, codes, failed }] of cases.entries()) {
    for (const [rank, ends] of ranks.entries()) {
      const { code, elsewhere: heard, weightBytes, milliseconds } = ends[i] as LoadEnd
      expect(code, `${what}, rank ${rank}`).toBe(codes[rank])
      expect(weightBytes > 0, what).toBe(code === 'LOADED')
      // The slow ranks would need 15 s for their weights, four at a time.
      expect(milliseconds, what).toBeLessThan(codes[0] === 'LOADED' ? 30_000 : 2000)
      if (code === elsewhere) expect(heard).toMatchObject({ rank: failed, code: codes[failed as number] })
    }
  }
})

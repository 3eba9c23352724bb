import { once } from 'node:events'
import { cp, mkdir, mkdtemp, readdir, rm, stat, truncate, writeFile } from 'node:fs/promises'
import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { onRanks, referencePath } from '@rankwise/fixtures'
import { expect, it, onTestFinished } from 'vitest'
import type { LoadEnd, LoadScenario } from './workers/load-failures.ts'

const WORKER = new URL('workers/load-failures.ts', import.meta.url)
const PIPELINE = referencePath('flux2-klein-tiny')
const WHOLE = referencePath('flux2-klein-tiny', 'transformer')

async function temporaryFolder(): Promise<string> {
  const directory = await mkdtemp(join(tmpdir(), 'rankwise-'))
  onTestFinished(() => rm(directory, { recursive: true, force: true }))
  return directory
}

/** A copy of a checkpoint, as another machine has one. */
async function copyOf(checkpoint: string): Promise<string> {
  const directory = await temporaryFolder()
  await cp(checkpoint, directory, { recursive: true })
  return directory
}

/** A copy of a checkpoint whose last weight file is cut off. */
async function truncated(checkpoint: string, subfolder = ''): Promise<string> {
  const directory = await copyOf(checkpoint)
  const folder = join(directory, subfolder)
  const file =
    (await readdir(folder))
      .filter((name) => name.endsWith('.safetensors'))
      .sort()
      .at(-1) ?? ''
  const { size } = await stat(join(folder, file))
  await truncate(join(folder, file), size - 1)
  return directory
}

async function without(file: string, checkpoint: string): Promise<string> {
  const directory = await copyOf(checkpoint)
  await rm(join(directory, file))
  return directory
}

/** A cache of the hub that has the transformer at the tip of `main`. */
async function cacheOf(id: string): Promise<string> {
  const cache = await temporaryFolder()
  const repository = join(cache, `models--${id.replace('/', '--')}`)
  const commit = 'c'.repeat(40)
  await mkdir(join(repository, 'refs'), { recursive: true })
  await writeFile(join(repository, 'refs', 'main'), commit)
  await cp(WHOLE, join(repository, 'snapshots', commit), { recursive: true })
  return cache
}

/** A hub that takes every request and answers none. */
async function silentHub(): Promise<string> {
  const server = createServer(() => {}).listen(0, '127.0.0.1')
  await once(server, 'listening')
  onTestFinished(() => {
    server.closeAllConnections()
    server.close()
  })
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`
}

/** What rank 0 and rank 1 end with. */
interface Expected {
  readonly what: string
  readonly codes: readonly [string, string]
  /** The rank that fails, for the other. */
  readonly failed?: number
  /** What both say of options that differ. */
  readonly different?: Readonly<Record<string, readonly [string, string]>>
}

/** Loads of a pipeline whose ranks have other options. */
const DIFFERENT: readonly [
  what: string,
  options: NonNullable<LoadScenario['options']>,
  different: NonNullable<Expected['different']>,
][] = [
  [
    'a dtype of a text encoder of its own',
    [{ dtype: { textEncoder: 'bfloat16' } }, {}],
    { 'dtype.textEncoder': ['bfloat16', 'float32'] },
  ],
  [
    'a dtype of the text encoder that rank 0 has,',
    [{ textEncoderPlacement: 'rank0' }, { textEncoderPlacement: 'rank0', dtype: { textEncoder: 'bfloat16' } }],
    { 'dtype.textEncoder': ['float32', 'bfloat16'] },
  ],
  ['lowMemory', [{}, { lowMemory: true }], { lowMemory: ['false', 'true'] }],
  [
    'a textEncoderPlacement',
    [{ textEncoderPlacement: 'sharded' }, { textEncoderPlacement: 'replicated' }],
    { textEncoderPlacement: ['sharded', 'replicated'] },
  ],
  [
    'several options',
    [
      { dtype: 'bfloat16', textEncoderPlacement: 'rank0' },
      { dtype: { default: 'bfloat16', vae: 'float32' }, textEncoderPlacement: 'sharded', lowMemory: true },
    ],
    { 'dtype.vae': ['bfloat16', 'float32'], lowMemory: ['false', 'true'], textEncoderPlacement: ['rank0', 'sharded'] },
  ],
]

const DEVICE_MAP: object = { deviceMap: 'auto' }

it('two ranks load together or not at all, and their group outlives it', async () => {
  const broken = await truncated(WHOLE)
  const undecodable = await truncated(PIPELINE, 'vae')
  const untransformable = await truncated(PIPELINE, 'transformer')
  const unconfigured = await without('config.json', WHOLE)
  const unscheduled = await without('scheduler/scheduler_config.json', PIPELINE)
  const unencoded = await without('text_encoder/config.json', PIPELINE)
  const id = 'org/flux2-klein-tiny'
  const hub = { cacheDir: await cacheOf(id), localFilesOnly: true }
  const silent = { cacheDir: await temporaryFolder(), token: false as const, endpoint: await silentHub() }
  const elsewhere = 'LOAD_FAILED_ELSEWHERE'
  const cases: readonly (Expected & { readonly scenario: LoadScenario })[] = [
    {
      what: 'a truncated file',
      scenario: { type: 'transformer', places: [WHOLE, broken], delays: [1000, 0] },
      codes: [elsewhere, 'SAFETENSORS_TRUNCATED'],
      failed: 1,
    },
    {
      what: 'no config',
      scenario: { type: 'transformer', places: [unconfigured, WHOLE], delays: [0, 1000] },
      codes: ['CONFIG_NOT_FOUND', elsewhere],
      failed: 0,
    },
    {
      what: 'an abort',
      scenario: { type: 'transformer', places: [WHOLE, WHOLE], delays: [1000, 1000], aborts: [undefined, 300] },
      codes: [elsewhere, 'ABORTED'],
      failed: 1,
    },
    {
      what: 'an abort of a rank that waits for the other',
      scenario: { type: 'transformer', places: [WHOLE, WHOLE], delays: [0, 1000], aborts: [1000, undefined] },
      codes: ['ABORTED', elsewhere],
      failed: 0,
    },
    {
      what: 'a hub that one rank cannot ask',
      scenario: {
        type: 'transformer',
        places: [id, id],
        hubs: [hub, { ...hub, endpoint: 'nowhere' }],
        delays: [1000, 1000],
      },
      codes: [elsewhere, 'HUB_ENDPOINT'],
      failed: 1,
    },
    {
      what: 'an abort of rank 0 while the hub does not answer it',
      scenario: {
        type: 'transformer',
        places: [id, id],
        hubs: [silent, silent],
        delays: [0, 0],
        aborts: [300, undefined],
      },
      codes: ['ABORTED', elsewhere],
      failed: 0,
    },
    {
      what: 'an abort of rank 1 while the hub does not answer rank 0',
      scenario: {
        type: 'transformer',
        places: [id, id],
        hubs: [silent, silent],
        delays: [0, 0],
        aborts: [undefined, 300],
      },
      codes: [elsewhere, 'ABORTED'],
      failed: 1,
    },
    {
      what: 'an abort of a pipeline while the hub does not answer',
      scenario: {
        type: 'pipeline',
        places: [id, id],
        hubs: [silent, silent],
        delays: [0, 0],
        aborts: [undefined, 300],
      },
      codes: [elsewhere, 'ABORTED'],
      failed: 1,
    },
    {
      what: 'an id on one rank, a folder on the other',
      scenario: { type: 'transformer', places: [id, WHOLE], hubs: [hub, hub], delays: [0, 0] },
      codes: ['LOAD_DIFFERS', 'LOAD_DIFFERS'],
    },
    {
      what: 'a folder on one rank, an id on the other',
      scenario: { type: 'transformer', places: [WHOLE, id], hubs: [hub, hub], delays: [0, 0] },
      codes: ['LOAD_DIFFERS', 'LOAD_DIFFERS'],
    },
    {
      what: 'an option that one rank alone has',
      scenario: { type: 'transformer', places: [WHOLE, WHOLE], hubs: [{}, DEVICE_MAP], delays: [1000, 1000] },
      codes: [elsewhere, 'DEVICE_MAP_UNSUPPORTED'],
      failed: 1,
    },
    {
      what: 'a degree that one rank alone has',
      scenario: { type: 'transformer', places: [WHOLE, WHOLE], degrees: [4, 2], delays: [1000, 1000] },
      codes: ['TP_DEGREE_WORLD_SIZE', elsewhere],
      failed: 0,
    },
    ...DIFFERENT.map(([what, options, different]) => ({
      what: `${what} on one rank`,
      scenario: { type: 'pipeline' as const, places: [PIPELINE, PIPELINE], options, delays: [1000, 0] },
      codes: ['LOAD_DIFFERS', 'LOAD_DIFFERS'] as const,
      different,
    })),
    {
      what: 'a dtype of a transformer on one rank',
      scenario: {
        type: 'transformer',
        places: [WHOLE, WHOLE],
        options: [{}, { dtype: 'bfloat16' }],
        delays: [0, 1000],
      },
      codes: ['LOAD_DIFFERS', 'LOAD_DIFFERS'],
      different: { dtype: ['float32', 'bfloat16'] },
    },
    {
      what: 'the same options, said in other words',
      scenario: {
        type: 'pipeline',
        places: [PIPELINE, PIPELINE],
        options: [
          { dtype: 'bfloat16', lowMemory: true },
          { dtype: { default: 'bfloat16', vae: 'bfloat16' }, lowMemory: true },
        ],
        delays: [0, 0],
      },
      codes: ['LOADED', 'LOADED'],
    },
    {
      what: 'a hub that all have cached',
      scenario: { type: 'transformer', places: [id, id], hubs: [hub, hub], delays: [0, 0] },
      codes: ['LOADED', 'LOADED'],
    },
    {
      what: 'a pipeline without scheduler',
      scenario: { type: 'pipeline', places: [PIPELINE, unscheduled], delays: [1000, 1000] },
      codes: [elsewhere, 'CONFIG_NOT_FOUND'],
      failed: 1,
    },
    {
      what: 'a pipeline without text encoder',
      scenario: { type: 'pipeline', places: [unencoded, PIPELINE], delays: [1000, 1000] },
      codes: ['CONFIG_NOT_FOUND', elsewhere],
      failed: 0,
    },
    {
      what: 'a pipeline whose VAE is cut off, as its other models load',
      scenario: {
        type: 'pipeline',
        places: [PIPELINE, undecodable],
        textEncoderPlacement: 'sharded',
        delays: [1000, 1000],
      },
      codes: [elsewhere, 'SAFETENSORS_TRUNCATED'],
      failed: 1,
    },
    {
      what: 'a pipeline whose transformer is cut off, as rank 0 alone loads the text encoder',
      scenario: {
        type: 'pipeline',
        places: [PIPELINE, untransformable],
        textEncoderPlacement: 'rank0',
        delays: [1000, 1000],
      },
      codes: [elsewhere, 'SAFETENSORS_TRUNCATED'],
      failed: 1,
    },
    {
      what: 'an abort as all models load',
      scenario: {
        type: 'pipeline',
        places: [PIPELINE, PIPELINE],
        textEncoderPlacement: 'rank0',
        delays: [1000, 1000],
        aborts: [undefined, 300],
      },
      codes: [elsewhere, 'ABORTED'],
      failed: 1,
    },
    {
      what: 'a whole pipeline that is split, with ranks that are fast and slow',
      scenario: { type: 'pipeline', places: [PIPELINE, PIPELINE], textEncoderPlacement: 'sharded', delays: [0, 1] },
      codes: ['LOADED', 'LOADED'],
    },
    {
      what: 'a whole pipeline of which rank 0 alone has the text encoder',
      scenario: { type: 'pipeline', places: [PIPELINE, PIPELINE], textEncoderPlacement: 'rank0', delays: [1, 0] },
      codes: ['LOADED', 'LOADED'],
    },
    {
      what: 'a whole pipeline',
      scenario: { type: 'pipeline', places: [PIPELINE, PIPELINE], delays: [0, 1] },
      codes: ['LOADED', 'LOADED'],
    },
    {
      what: 'nothing',
      scenario: { type: 'transformer', places: [WHOLE, WHOLE], delays: [0, 5] },
      codes: ['LOADED', 'LOADED'],
    },
  ]
  const ranks = await onRanks<readonly LoadEnd[]>(
    2,
    WORKER,
    cases.map(({ scenario }) => scenario),
  )
  for (const [i, { what, codes, failed, different = {} }] of cases.entries()) {
    for (const [rank, ends] of ranks.entries()) {
      const { code, elsewhere: heard, different: said, weightBytes, milliseconds } = ends[i] as LoadEnd
      expect(code, `${what}, rank ${rank}`).toBe(codes[rank])
      expect(said, `${what}, rank ${rank}`).toEqual(different)
      expect(weightBytes > 0, what).toBe(code === 'LOADED')
      // The slow ranks would need 15 s for their weights, four at a time.
      expect(milliseconds, what).toBeLessThan(codes[0] === 'LOADED' ? 30_000 : 2000)
      if (code === elsewhere) expect(heard).toMatchObject({ rank: failed, code: codes[failed as number] })
    }
  }
})

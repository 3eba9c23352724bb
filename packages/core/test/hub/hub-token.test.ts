import { readdir, readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { inspect } from 'node:util'
import { describe, expect, it, onTestFinished, vi } from 'vitest'
import { hubSettings } from '../../src/hub/hub-settings.ts'
import { HubTransport } from '../../src/hub/hub-transport.ts'
import { HubCheckpoint, type HubOptions, HubRepository, openPretrained } from '../../src/hub/index.ts'
import { expectCode } from '../checkpoint/files.ts'
import type { Fault } from './faulty-answer.ts'
import { hubWithPipeline, ID, PIPELINE } from './hub-setup.ts'

const TOKEN = 'hf_verySecretToken'

/** Whatever could be printed of a value: its fields, hidden ones too, and where an error comes from. */
function printed(value: unknown): string {
  const stack = value instanceof Error ? `${value.stack} ${inspect(value.cause, { depth: 20 })}` : ''
  const json = JSON.stringify(value, (_, field) => (typeof field === 'bigint' ? String(field) : field))
  return `${inspect(value, { depth: 20, showHidden: true, getters: true })} ${json} ${stack}`
}

async function filesBelow(folder: string): Promise<string> {
  const entries = await readdir(folder, { recursive: true, withFileTypes: true })
  const texts = entries.map(async (entry) => {
    const path = join(entry.parentPath, entry.name)
    return entry.isDirectory() ? entry.name : `${entry.name} ${await readFile(path, 'latin1')}`
  })
  return (await Promise.all(texts)).join('\n')
}

/** Records everything that is printed or warned about while the test runs. */
function recordOutput(): string[] {
  const output: string[] = []
  const record = (...values: readonly unknown[]) => void output.push(values.map(printed).join(' '))
  const spies = [
    vi.spyOn(process, 'emitWarning').mockImplementation(record),
    ...(['log', 'info', 'warn', 'error', 'debug'] as const).map((name) =>
      vi.spyOn(console, name).mockImplementation(record),
    ),
  ]
  onTestFinished(() => {
    for (const spy of spies) spy.mockRestore()
  })
  return output
}

const FAULTS: readonly Fault[] = [
  { kind: 'status', status: 401 },
  { kind: 'status', status: 403, headers: { 'x-error-code': 'GatedRepo', 'x-error-message': TOKEN } },
  { kind: 'status', status: 404, headers: { 'x-error-code': TOKEN } },
  { kind: 'status', status: 418 },
  { kind: 'status', status: 503 },
  { kind: 'status', status: 302, headers: { location: `https://u:${TOKEN}@example.com/` } },
  { kind: 'status', status: 302, headers: { location: `http://127.0.0.1:1/?token=${TOKEN}` } },
  { kind: 'garbage' },
  { kind: 'text' },
  { kind: 'drop', after: 5 },
  { kind: 'corrupt' },
  { kind: 'noRanges' },
  { kind: 'headers', headers: { etag: '"other"', 'x-repo-commit': 'f'.repeat(40) } },
]

describe('the token', () => {
  it('and signatures of addresses are in no error, no output and no file', async () => {
    const { server, repo, cacheDir, options } = await hubWithPipeline()
    server.repos.set(ID, { ...repo, token: TOKEN })
    const output = recordOutput()
    const withToken: HubOptions = { ...options, token: TOKEN, retry: { attempts: 2, delayMs: 1 } }
    for (const kind of ['api', 'hub', 'storage'] as const) {
      for (const fault of FAULTS) {
        server.fault = (request) => (request.kind === kind ? fault : undefined)
        for (const load of [loadSnapshot, loadShards]) {
          await load(withToken, (progress) => output.push(printed(progress))).catch((error) =>
            output.push(printed(error)),
          )
        }
      }
    }
    server.fault = () => undefined
    const repository = await HubRepository.open(ID, withToken)
    await repository.download(PIPELINE)
    await using checkpoint = await HubCheckpoint.open(repository, { subfolder: 'transformer' })
    const sources = [...checkpoint.tensors.keys()].map((name) => checkpoint.source(name))
    await sources[0]?.read()
    output.push(printed(repository), printed(checkpoint), printed(sources), await filesBelow(cacheDir))
    expect(server.log.some(({ headers }) => headers.authorization === `Bearer ${TOKEN}`)).toBe(true)
    expect(output.length).toBeGreaterThan(50)
    for (const text of output) {
      expect(text).not.toContain(TOKEN)
      expect(text).not.toContain('signed-secret')
    }
  })

  it('is sent to the origin of the hub alone', async () => {
    const { server, repo, options } = await hubWithPipeline()
    server.repos.set(ID, { ...repo, token: TOKEN })
    await (await openPretrained(ID, { ...options, token: TOKEN }))?.download(PIPELINE)
    for (const { kind, headers } of server.log) {
      expect(headers.authorization).toBe(kind === 'storage' ? undefined : `Bearer ${TOKEN}`)
    }
  })
})

describe('a redirect', () => {
  it('does not leave https', async () => {
    const headers = { location: 'http://storage.example/file' }
    const fetched = vi.spyOn(globalThis, 'fetch').mockResolvedValue(new Response(null, { status: 302, headers }))
    onTestFinished(() => fetched.mockRestore())
    const settings = hubSettings({ env: {}, endpoint: 'https://hub.example' })
    const transport = new HubTransport(settings, TOKEN)
    const place = { repo: ID, file: 'config.json' }
    await expectCode(() => transport.get('https://hub.example/file', { place }), 'HUB_RESPONSE', 'https addresses')
    expect(fetched).toHaveBeenCalledTimes(1)
  })
})

type OnProgress = (progress: unknown) => void

async function loadSnapshot(options: HubOptions, onProgress: OnProgress): Promise<unknown> {
  return (await HubRepository.open(ID, options)).download(PIPELINE, { onProgress })
}

async function loadShards(options: HubOptions): Promise<unknown> {
  const repository = await HubRepository.open(ID, options)
  await using checkpoint = await HubCheckpoint.open(repository, { subfolder: 'transformer' })
  for (const name of checkpoint.tensors.keys()) await checkpoint.source(name).read()
  return checkpoint
}

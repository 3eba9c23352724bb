import { execFile } from 'node:child_process'
import { readdir, readFile, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { promisify } from 'node:util'
import { describe, expect, it, onTestFinished, vi } from 'vitest'
import { type HubOptions, HubRepository } from '../../src/hub/index.ts'
import { expectCode, patternBytes, temporaryFolder } from '../checkpoint/files.ts'
import { random } from '../support.ts'
import type { Fault, RequestLog } from './faulty-answer.ts'
import { gitOid, type HubRepo, HubServer, sha256 } from './hub-server.ts'
import { hashes, hashesOf, leftovers, optionsFor } from './hub-setup.ts'

const SMALL_ID = 'org/small'
const WEIGHTS = 'model.safetensors'
const SELECTION = { folders: [''] }

/** A model of a few files: large enough to be cut in the middle, small enough to be downloaded often. */
async function hubWithModel() {
  const server = await HubServer.start()
  const contents: Record<string, Buffer> = {
    'config.json': Buffer.from('{"a": 1}'),
    'vocab.json': Buffer.alloc(70_000, 'vocabulary '),
    [WEIGHTS]: Buffer.from(patternBytes(300_000)),
    'empty.txt': Buffer.alloc(0),
  }
  const repo: HubRepo = { commit: 'c'.repeat(40), files: new Map(Object.entries(contents)) }
  server.repos.set(SMALL_ID, repo)
  const cacheDir = await temporaryFolder()
  const options = optionsFor(server, cacheDir)
  return { server, repo, cacheDir, options }
}

async function download(options: HubOptions): Promise<string> {
  return (await HubRepository.open(SMALL_ID, options)).download(SELECTION)
}

/** Answers of the storage go wrong, in this order; then none. */
function storageFaults(server: HubServer, ...faults: readonly (Fault | undefined)[]): void {
  const queue = [...faults]
  server.fault = ({ kind }) => (kind === 'storage' ? queue.shift() : undefined)
}

describe('a broken download', () => {
  it('goes on where the connection was dropped', async () => {
    const { server, repo, options } = await hubWithModel()
    repo.files.delete('vocab.json')
    storageFaults(server, { kind: 'drop', after: 100_000 }, { kind: 'drop', after: 100_000 })
    expect(await hashesOf(await download(options))).toEqual(hashes(repo.files))
    expect(server.requests('storage').length).toBe(3)
    expect(server.bytes('storage')).toBeLessThan(500_000)
  })

  it('goes on in another process, be it with a listing that is new', async () => {
    const { server, repo, cacheDir, options } = await hubWithModel()
    repo.files.delete('vocab.json')
    server.fault = ({ kind }) => (kind === 'storage' ? { kind: 'drop', after: 30_000 } : undefined)
    const once = { ...options, retry: { attempts: 1, delayMs: 1 } }
    await expectCode(() => download(once), 'HUB_NETWORK', WEIGHTS, 'attempts 1')
    expect(await leftovers(cacheDir)).toHaveLength(1)
    server.fault = () => undefined
    server.log.length = 0
    expect(await hashesOf(await download(options))).toEqual(hashes(repo.files))
    expect(server.bytes('storage')).toBeLessThan(300_000)
    expect(await leftovers(cacheDir)).toEqual([])
  })

  it('takes no more than it asked for', async () => {
    const { server, repo, options } = await hubWithModel()
    repo.files.delete('vocab.json')
    storageFaults(server, { kind: 'drop', after: 50_000 }, { kind: 'extra' })
    expect(await hashesOf(await download(options))).toEqual(hashes(repo.files))
  })

  it('asks again when something else answers for the hub', async () => {
    const { server, repo, options } = await hubWithModel()
    let answers = 0
    server.fault = ({ kind }) => (kind === 'api' && answers++ < 3 ? { kind: 'text' } : undefined)
    expect(await hashesOf(await download(options))).toEqual(hashes(repo.files))
    expect(server.requests('api')).toHaveLength(5)
  })

  it('starts anew when what was left is not what the hub has', async () => {
    const { server, repo, cacheDir, options } = await hubWithModel()
    storageFaults(server, { kind: 'drop', after: 30_000 }, { kind: 'drop', after: 30_000 })
    await download({ ...options, retry: { attempts: 1 } }).catch(() => undefined)
    const blobs = join(cacheDir, 'models--org--small', 'blobs')
    for (const name of await leftovers(cacheDir)) await writeFile(join(cacheDir, name), Buffer.alloc(20_000, 7))
    expect(await hashesOf(await download(options))).toEqual(hashes(repo.files))
    expect((await readdir(blobs)).sort()).toEqual(
      [...repo.files.values()].map((content) => oidOf(server, content)).sort(),
    )
  })

  it.each([
    { fault: { kind: 'corrupt' }, code: 'HUB_CHANGED', text: 'hash' },
    { fault: { kind: 'headers', headers: { 'content-encoding': 'gzip' } }, code: 'HUB_RESPONSE', text: 'compressed' },
    { fault: { kind: 'status', status: 416 }, code: 'HUB_CHANGED', text: 'status 416' },
    { fault: { kind: 'status', status: 404 }, code: 'HUB_NOT_FOUND', text: 'status 404' },
    { fault: { kind: 'status', status: 403 }, code: 'HUB_NETWORK', text: 'status 403' },
    { fault: { kind: 'status', status: 418 }, code: 'HUB_RESPONSE', text: 'status 418' },
    { fault: { kind: 'status', status: 503 }, code: 'HUB_NETWORK', text: 'status 503' },
    { fault: { kind: 'garbage' }, code: 'HUB_NETWORK', text: 'attempts 3' },
    { fault: { kind: 'hang', after: 0 }, code: 'HUB_NETWORK', text: 'in 100 ms' },
    { fault: { kind: 'hang', after: 50_000 }, code: 'HUB_NETWORK', text: 'in 100 ms' },
    { fault: { kind: 'drip' }, code: 'HUB_NETWORK', text: 'in 100 ms' },
    { fault: { kind: 'longerLength' }, code: 'HUB_CHANGED', text: 'size 300000' },
  ] as const)(
    'that fails for good with $fault is $code and leaves nothing that is taken for a file',
    async ({ fault, code, text }) => {
      const { server, repo, cacheDir, options } = await hubWithModel()
      repo.files.delete('vocab.json')
      server.fault = ({ kind }) => (kind === 'storage' ? fault : undefined)
      const fast = { ...options, timeoutMs: 100, retry: { attempts: 3, delayMs: 1 } }
      await expectCode(() => download(fast), code, text, SMALL_ID)
      await expectWholeBlobs(server, cacheDir)
      server.fault = () => undefined
      expect(await hashesOf(await download(options))).toEqual(hashes(repo.files))
    },
  )

  it('of one file ends those of the others at once', async () => {
    const { server, options } = await hubWithModel()
    server.fault = ({ kind, path }) => {
      if (kind === 'storage') return { kind: 'hang', after: 10 }
      return path.endsWith('config.json') ? { kind: 'status', status: 404 } : undefined
    }
    const before = performance.now()
    await expectCode(() => download(options), 'HUB_NOT_FOUND', 'config.json')
    expect(performance.now() - before).toBeLessThan(2000)
  })

  it('is refused when another commit or content comes than was listed', async () => {
    const { server, options } = await hubWithModel()
    const answer = (headers: Readonly<Record<string, string>>) => {
      server.fault = ({ kind }) => (kind === 'hub' ? { kind: 'headers', headers } : undefined)
    }
    answer({ 'x-repo-commit': 'd'.repeat(40) })
    await expectCode(() => download(options), 'HUB_CHANGED', 'd'.repeat(40), 'c'.repeat(40))
    answer({ 'x-linked-etag': `"${'e'.repeat(64)}"` })
    await expectCode(() => download(options), 'HUB_CHANGED', 'e'.repeat(64))
  })

  it('is refused when redirected in circles, or to where it must not go', async () => {
    const { server, options } = await hubWithModel()
    const redirect = (location: string) => {
      server.fault = ({ kind, path }) =>
        kind === 'hub' && path.endsWith(WEIGHTS) ? { kind: 'status', status: 302, headers: { location } } : undefined
    }
    redirect(`/${SMALL_ID}/resolve/${'c'.repeat(40)}/${WEIGHTS}`)
    await expectCode(() => download(options), 'HUB_RESPONSE', 'without end')
    for (const location of ['file:///etc/passwd', 'https://user:secret@example.com', 'gopher://x', 'http://[']) {
      redirect(location)
      await expectCode(() => download(options), 'HUB_RESPONSE', 'redirects to an address')
    }
  })
})

describe('waiting', () => {
  it.each([429, 503])('honours Retry-After of status %i', async (status) => {
    const { server, repo, options } = await hubWithModel()
    storageFaults(server, { kind: 'status', status, headers: { 'retry-after': '1' } })
    const before = performance.now()
    expect(await hashesOf(await download(options))).toEqual(hashes(repo.files))
    expect(performance.now() - before).toBeGreaterThan(990)
  })

  it('honours the RateLimit header of the hub, and dates', async () => {
    const { server, repo, options } = await hubWithModel()
    const headers = [{ ratelimit: '"api";r=0;t=0' }, { 'retry-after': new Date(Date.now() - 5000).toUTCString() }]
    server.fault = ({ kind }) => {
      const next = kind === 'api' ? headers.shift() : undefined
      return next === undefined ? undefined : { kind: 'status', status: 429, headers: next }
    }
    // Without them the first wait would be a minute.
    const slow = { ...options, retry: { attempts: 3, delayMs: 60_000, maxDelayMs: 60_000 } }
    expect(await hashesOf(await download(slow))).toEqual(hashes(repo.files))
  })

  it('is not longer than the longest wait', async () => {
    const { server, options } = await hubWithModel()
    server.fault = () => ({ kind: 'status', status: 429, headers: { 'retry-after': '3600' } })
    await expectCode(() => download(options), 'HUB_NETWORK', 'status 429', 'retryAfterMs 3600000', 'longestWaitMs 1000')
  })

  it('ends when it is aborted', async () => {
    const { server, options } = await hubWithModel()
    server.fault = () => ({ kind: 'status', status: 503 })
    const retry = { attempts: 9, delayMs: 60_000, maxDelayMs: 60_000 }
    const signal = AbortSignal.timeout(100)
    await expectCode(() => download({ ...options, retry, signal }), 'ABORTED')
  })
})

describe('random faults', () => {
  it('never hang, never leave part of a file, and end in the right content', async () => {
    const warn = vi.spyOn(process, 'emitWarning').mockImplementation(() => undefined)
    onTestFinished(() => warn.mockRestore())
    let injected = 0
    for (let seed = 0; injected < 150; seed++) {
      const { server, repo, cacheDir, options } = await hubWithModel()
      const next = random(seed)
      server.fault = (request) => {
        if (next() < 0.5) return undefined
        injected++
        return randomFault(request, next)
      }
      const fast = { ...options, timeoutMs: 100, retry: { attempts: 3, delayMs: 1, maxDelayMs: 50 } }
      for (let attempt = 0; attempt < 4; attempt++) {
        const error = await download(fast).then(
          () => undefined,
          (thrown: unknown) => thrown,
        )
        if (error !== undefined) expect(error).toHaveProperty('code', expect.stringMatching(/^HUB_/))
        await expectWholeBlobs(server, cacheDir)
      }
      server.fault = () => undefined
      expect(await hashesOf(await download(options)), `seed ${seed}`).toEqual(hashes(repo.files))
      expect(await leftovers(cacheDir), `seed ${seed}`).toEqual([])
      await server.stop()
    }
  }, 120_000)
})

describe('a disk that takes no more', () => {
  it('is an error that leaves nothing half', async () => {
    const { server, cacheDir } = await hubWithModel()
    const program = join(import.meta.dirname, '..', 'workers', 'hub-download.ts')
    // No file may grow beyond 100 KB: the weights do not fit.
    const limit = 'ulimit -f 100; trap "" XFSZ; exec "$@"'
    const node = [process.execPath, '--import', 'tsx', '--conditions=@rankwise/source', program]
    const argument = JSON.stringify({ id: SMALL_ID, endpoint: server.endpoint, cacheDir, selection: SELECTION })
    const run = promisify(execFile)('bash', ['-c', limit, 'bash', ...node, argument])
    const { stdout } = await run
    expect(JSON.parse(stdout)).toMatchObject({ code: 'HUB_CACHE', message: expect.stringContaining('EFBIG') })
    await expectWholeBlobs(server, cacheDir)
    expect(await leftovers(cacheDir)).toEqual([])
  })
})

function randomFault({ kind }: RequestLog, next: () => number): Fault {
  const after = Math.floor(next() * 300_000)
  const faults: readonly Fault[] = [
    { kind: 'drop', after },
    { kind: 'drop', after: Math.floor(after / 1000) },
    { kind: 'hang', after },
    { kind: 'drip' },
    { kind: 'garbage' },
    { kind: 'status', status: 429, headers: { 'retry-after': '0' } },
    { kind: 'status', status: 503 },
    { kind: 'status', status: 500 },
    { kind: 'longerLength' },
    kind === 'api' ? { kind: 'text' } : { kind: 'corrupt' },
    { kind: 'headers', headers: { etag: '"other"' } },
    { kind: 'noRanges' },
    { kind: 'wrongRange' },
  ]
  return faults[Math.floor(next() * faults.length)] as Fault
}

/** Whatever has the name of a content is that content. */
async function expectWholeBlobs(server: HubServer, cacheDir: string): Promise<void> {
  const blobs = join(cacheDir, 'models--org--small', 'blobs')
  for (const name of await readdir(blobs).catch(() => [])) {
    if (!name.endsWith('.incomplete')) expect(oidOf(server, await readFile(join(blobs, name)))).toBe(name)
  }
}

function oidOf({ lfsFrom }: HubServer, content: Buffer): string {
  return content.length >= lfsFrom ? sha256(content) : gitOid(content)
}

import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { stat } from 'node:fs/promises'
import { join } from 'node:path'
import { text } from 'node:stream/consumers'
import { setTimeout as sleep } from 'node:timers/promises'
import { describe, expect, it, onTestFinished } from 'vitest'
import { gitOid, type HubServer, sha256 } from './hub-server.ts'
import { downloadPipeline, hashes, hashesOf, hubWithPipeline, ID, leftovers, PIPELINE } from './hub-setup.ts'

const PROGRAM = join(import.meta.dirname, '..', 'workers', 'hub-download.ts')

/** Starts a process that downloads the pipeline. */
function startDownload({ endpoint }: HubServer, cacheDir: string): { child: ChildProcess; result: Promise<unknown> } {
  const argument = JSON.stringify({ id: ID, endpoint, cacheDir, selection: PIPELINE })
  const child = spawn(process.execPath, ['--import', 'tsx', '--conditions=@rankwise/source', PROGRAM, argument], {
    stdio: ['ignore', 'pipe', 'inherit'],
  })
  onTestFinished(() => void child.kill('SIGKILL'))
  return { child, result: text(child.stdout).then((output) => (output === '' ? undefined : JSON.parse(output))) }
}

/** Whether the lock and a part of the weights are all that is left: everything else is complete. */
async function hasPart(cacheDir: string): Promise<boolean> {
  const left = await leftovers(cacheDir)
  const part = left.find((name) => name.endsWith('incomplete'))
  return left.length === 2 && part !== undefined && (await stat(join(cacheDir, part))).size > 0
}

describe('processes that share a cache', () => {
  it.each([2, 4])('%i at once fetch each file once', async (count) => {
    const { server, repo, cacheDir } = await hubWithPipeline()
    const results = await Promise.all(Array.from({ length: count }, () => startDownload(server, cacheDir).result))
    const snapshot = join(cacheDir, 'models--org--flux2-klein-tiny', 'snapshots', repo.commit)
    expect(results).toEqual(Array.from({ length: count }, () => ({ snapshot })))
    expect(await hashesOf(snapshot)).toEqual(hashes(repo.files))
    for (const [path, content] of repo.files) {
      const kind = content.length >= server.lfsFrom ? 'storage' : 'hub'
      const requests = server.requests(kind, kind === 'storage' ? sha256(content) : path)
      expect(requests, `${path} ${gitOid(content)}`).toHaveLength(1)
    }
    expect(await leftovers(cacheDir)).toEqual([])
  })

  it('never see a file that another is writing', async () => {
    const { server, repo, cacheDir, options } = await hubWithPipeline()
    const weights = repo.files.get('text_encoder/model.safetensors') as Buffer
    // The first answer comes in two parts, with time between them.
    let isFirst = true
    server.fault = ({ kind, path }) => {
      if (kind !== 'storage' || !path.includes(sha256(weights)) || !isFirst) return undefined
      isFirst = false
      return { kind: 'hang', after: 800_000 }
    }
    const { result } = startDownload(server, cacheDir)
    while (isFirst) await sleep(10)
    expect(await hashesOf(await downloadPipeline(options))).toEqual(hashes(repo.files))
    expect(await result).toHaveProperty('snapshot')
    expect(server.requests('storage', sha256(weights))).toHaveLength(2)
  })

  it.each(['SIGKILL', 'SIGTERM'] as const)('go on where one that was ended by %s has stopped', async (signal) => {
    const { server, repo, cacheDir, options } = await hubWithPipeline()
    const weights = repo.files.get('text_encoder/model.safetensors') as Buffer
    server.fault = ({ kind, path }) =>
      kind === 'storage' && path.includes(sha256(weights)) ? { kind: 'hang', after: 800_000 } : undefined
    const { child, result } = startDownload(server, cacheDir)
    const stored = [...repo.files.values()].filter(({ length }) => length >= server.lfsFrom).length
    const isAsked = () =>
      server.requests('hub').length >= repo.files.size && server.requests('storage').length >= stored
    while (!(isAsked() && (await hasPart(cacheDir)))) await sleep(50)
    child.kill(signal)
    await once(child, 'exit')
    expect(await result).toBeUndefined()
    expect(await leftovers(cacheDir)).toHaveLength(2)
    server.fault = () => undefined
    server.log.length = 0
    const before = performance.now()
    expect(await hashesOf(await downloadPipeline(options))).toEqual(hashes(repo.files))
    expect(performance.now() - before).toBeLessThan(10_000)
    expect(server.bytes('storage', sha256(weights))).toBeLessThan(weights.length)
    expect(await leftovers(cacheDir)).toEqual([])
  })
})

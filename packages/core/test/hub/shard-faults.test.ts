import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { describe, expect, it } from 'vitest'
import { HubCheckpoint, type HubOptions, HubRepository } from '../../src/hub/index.ts'
import { Tensor } from '../../src/index.ts'
import { writeSafetensors } from '../../src/save/index.ts'
import { expectCode, patternBytes, temporaryFolder } from '../checkpoint/files.ts'
import { random } from '../support.ts'
import type { Fault } from './faulty-answer.ts'
import { sha256 } from './hub-server.ts'
import { hubWithPipeline, ID } from './hub-setup.ts'
import { bytesOf, expectGolden, openTransformer, readAll, slicesOf, TRANSFORMER } from './transformer-shards.ts'

describe('a load by shards', () => {
  /** Opens without faults, reads with them. */
  async function readWith(fault: (path: string) => Fault | undefined, change: Partial<HubOptions> = {}) {
    const { server, options } = await hubWithPipeline()
    await using checkpoint = await openTransformer({ ...options, ...change })
    server.fault = ({ kind, path }) => (kind === 'storage' ? fault(path) : undefined)
    const tensors = await readAll(checkpoint, slicesOf(checkpoint, 0, 2))
    return { tensors, checkpoint, server }
  }

  it('goes on where a connection was dropped', async () => {
    let drops = 0
    const { tensors, checkpoint } = await readWith(() => (drops++ < 5 ? { kind: 'drop', after: 3000 } : undefined))
    expect(drops).toBeGreaterThan(5)
    await expectGolden(tensors, 0, 2)
    const { bytesRead } = checkpoint.stats
    const { checkpoint: whole } = await readWith(() => undefined)
    // A drop costs no byte that had arrived.
    expect(bytesRead).toBe(whole.stats.bytesRead)
  })

  it('takes no more than it asked for', async () => {
    const { tensors } = await readWith(() => ({ kind: 'extra' }))
    await expectGolden(tensors, 0, 2)
  })

  it('asks the hub again when the address of the storage has expired', async () => {
    let refusals = 0
    const { tensors, server } = await readWith(() => (refusals++ < 3 ? { kind: 'status', status: 403 } : undefined))
    await expectGolden(tensors, 0, 2)
    expect(server.requests('hub', '-of-00004').length).toBeGreaterThan(4)
  })

  it.each([
    { fault: { kind: 'headers', headers: { etag: '"other"' } }, code: 'HUB_CHANGED', text: '"other"' },
    { fault: { kind: 'status', status: 416 }, code: 'HUB_CHANGED', text: 'status 416' },
    { fault: { kind: 'status', status: 412 }, code: 'HUB_CHANGED', text: 'status 412' },
    {
      fault: { kind: 'headers', headers: { 'content-range': 'bytes 0-1/7' } },
      code: 'HUB_CHANGED',
      text: 'bytes 0-1/7',
    },
    { fault: { kind: 'noRanges' }, code: 'HUB_NO_RANGES', text: "download: 'snapshot'" },
    { fault: { kind: 'wrongRange' }, code: 'HUB_RESPONSE', text: 'another range' },
    { fault: { kind: 'status', status: 404 }, code: 'HUB_NOT_FOUND', text: 'status 404' },
    { fault: { kind: 'status', status: 500 }, code: 'HUB_NETWORK', text: 'attempts 3' },
    { fault: { kind: 'drop', after: 10 }, code: 'HUB_NETWORK', text: 'attempts 3' },
    { fault: { kind: 'hang', after: 10 }, code: 'HUB_NETWORK', text: 'in 100 ms' },
    { fault: { kind: 'drip' }, code: 'HUB_NETWORK', text: 'in 100 ms' },
  ] as const)('fails with $code for $fault', async ({ fault, code, text }) => {
    const change = { timeoutMs: 100, retry: { attempts: 3, delayMs: 1 } }
    await expectCode(() => readWith(() => fault, change), code, text, ID, 'safetensors')
  })

  it('never hangs, and never gives wrong bytes, whatever goes wrong', async () => {
    const faults: readonly Fault[] = [
      { kind: 'drop', after: 0 },
      { kind: 'drop', after: 5000 },
      { kind: 'garbage' },
      { kind: 'status', status: 503 },
      { kind: 'status', status: 429, headers: { 'retry-after': '0' } },
      { kind: 'status', status: 403 },
      { kind: 'hang', after: 100 },
    ]
    let injected = 0
    for (let seed = 0; injected < 100; seed++) {
      const next = random(seed)
      const change = { timeoutMs: 200, retry: { attempts: 12, delayMs: 1 } }
      const { tensors } = await readWith(() => {
        if (next() < 0.6) return undefined
        injected++
        return faults[Math.floor(next() * faults.length)]
      }, change)
      await expectGolden(tensors, 0, 2)
    }
  }, 120_000)

  it('can be aborted at once, and ends its transfers when it is closed', async () => {
    const { server, options } = await hubWithPipeline()
    await using checkpoint = await openTransformer(options)
    server.fault = () => ({ kind: 'hang', after: 10 })
    const [name] = [...checkpoint.tensors.keys()] as [string]
    const before = performance.now()
    const signal = AbortSignal.timeout(50)
    await expectCode(() => checkpoint.source(name).read({ signal }), 'ABORTED', name)
    const pending = checkpoint.source(name).read()
    const closing = checkpoint.close()
    await expectCode(() => pending, 'SAFETENSORS_CLOSED')
    await closing
    expect(performance.now() - before).toBeLessThan(1500)
    await expectCode(() => checkpoint.source(name).read(), 'SAFETENSORS_CLOSED')
  })

  it('is aborted by the signal it was opened with', async () => {
    const { server, options } = await hubWithPipeline()
    const controller = new AbortController()
    const repository = await HubRepository.open(ID, options)
    await using checkpoint = await HubCheckpoint.open(repository, { ...TRANSFORMER, signal: controller.signal })
    server.fault = () => ({ kind: 'hang', after: 10 })
    const [name] = [...checkpoint.tensors.keys()] as [string]
    setTimeout(() => controller.abort(), 30)
    await expectCode(() => checkpoint.source(name).read(), 'ABORTED')
  })

  it('fetches ahead within a bound of memory, four requests at a time', async () => {
    const { repo, server, options } = await hubWithPipeline()
    const MIB = 1024 * 1024
    const tensors = new Map<string, Tensor>()
    for (let i = 0; i < 12; i++) tensors.set(`weight.${i}`, new Tensor('uint8', [2 * MIB], patternBytes(2 * MIB)))
    const path = join(await temporaryFolder(), 'model.safetensors')
    await writeSafetensors(path, tensors)
    repo.files.set('big/model.safetensors', await readFile(path))
    const repository = await HubRepository.open(ID, options)
    const place = { subfolder: 'big', weightsName: 'model', prefetchBytes: 4 * MIB }
    await using checkpoint = await HubCheckpoint.open(repository, place)
    // Halves, so that neighbours do not share requests.
    const sources = [...tensors.keys()].map((name) => checkpoint.source(name, { dim: 0, ranges: [[0, MIB]] }))
    const sent = server.requests('storage').length
    const first = await sources[0]?.read()
    expect(sha256(bytesOf(first as Tensor))).toBe(sha256(patternBytes(MIB)))
    await new Promise((resolve) => setTimeout(resolve, 300))
    expect(server.requests('storage').length - sent).toBeLessThanOrEqual(5)
    expect(server.requests('storage').length - sent).toBeGreaterThan(1)
    for (const source of sources.slice(1)) await source.read()
    expect(server.requests('storage').length - sent).toBe(12)
  })
})

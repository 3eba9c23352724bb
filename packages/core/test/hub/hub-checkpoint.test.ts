import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { describe, expect, it } from 'vitest'
import { referencePath } from '../../../fixtures/src/reference.ts'
import { Checkpoint } from '../../src/checkpoint/index.ts'
import { HubCheckpoint, HubRepository } from '../../src/hub/index.ts'
import type { Tensor } from '../../src/index.ts'
import { expectCode } from '../checkpoint/files.ts'
import { random } from '../support.ts'
import type { HubServer } from './hub-server.ts'
import { hashesOf, hubWithPipeline, ID } from './hub-setup.ts'
import { bytesOf, expectGolden, openTransformer, readAll, slicesOf, TRANSFORMER } from './transformer-shards.ts'

describe('HubCheckpoint', () => {
  it.each([
    [2, 0],
    [2, 1],
    [4, 0],
    [4, 3],
  ])('at degree %i gives rank %i what diffusers gives it', async (tpDegree, rank) => {
    const { options } = await hubWithPipeline()
    await using checkpoint = await openTransformer(options)
    const tensors = await readAll(checkpoint, slicesOf(checkpoint, rank, tpDegree))
    expect(tensors.size).toBe(checkpoint.tensors.size)
    await expectGolden(tensors, rank, tpDegree)
  })

  it.each([1, 2, 4])('at degree %i fetches little more than colwise and replicated shards', async (tpDegree) => {
    const { server, options } = await hubWithPipeline()
    for (let rank = 0; rank < tpDegree; rank++) {
      server.log.length = 0
      await using checkpoint = await openTransformer(options)
      const headerBytes = server.bytes('storage')
      expect(checkpoint.stats.headerBytes).toBe(headerBytes - indexBytes(server))
      const slices = slicesOf(checkpoint, rank, tpDegree).filter(([, part]) => part === undefined || part.dim === 0)
      const shards = await readAll(checkpoint, slices)
      const shardBytes = [...shards.values()].reduce((sum, { byteLength }) => sum + byteLength, 0)
      const received = server.bytes('storage') - headerBytes
      expect(received).toBeLessThanOrEqual(1.05 * shardBytes)
      expect(checkpoint.stats.bytesRead).toBe(received)
      expect(checkpoint.stats.tensorsRead).toBe(shards.size)
      // What is guessed in vain of headers counts too, and is little.
      const exact = await exactHeaderBytes()
      expect(server.bytes('storage') - indexBytes(server)).toBeLessThanOrEqual(1.05 * shardBytes + exact)
    }
  })

  it.each([2, 4])('at degree %i reports the whole rows of rowwise shards', async (tpDegree) => {
    const { server, options } = await hubWithPipeline()
    await using checkpoint = await openTransformer(options)
    const headerBytes = server.bytes('storage')
    const slices = slicesOf(checkpoint, 1, tpDegree).filter(([, part]) => part?.dim === 1)
    const shards = await readAll(checkpoint, slices)
    const shardBytes = [...shards.values()].reduce((sum, { byteLength }) => sum + byteLength, 0)
    const received = server.bytes('storage') - headerBytes
    expect(checkpoint.stats.bytesRead).toBe(received)
    expect(received).toBeGreaterThan(0.8 * tpDegree * shardBytes)
    expect(received).toBeLessThanOrEqual(tpDegree * shardBytes)
  })

  it('needs few requests, and asks the hub once per file where it is', async () => {
    const { server, options } = await hubWithPipeline()
    await using checkpoint = await openTransformer(options)
    const sent = server.requests('storage').length
    await readAll(checkpoint, slicesOf(checkpoint, 0, 1))
    // Whole files: one request each.
    expect(server.requests('storage').length - sent).toBe(4)
    expect(checkpoint.stats.requests).toBe(server.requests('storage').length - 1)
    expect(server.requests('hub', '-of-00004')).toHaveLength(4)
  })

  it('uses its connections again', async () => {
    const { server, options } = await hubWithPipeline()
    await using checkpoint = await openTransformer(options)
    await readAll(checkpoint, slicesOf(checkpoint, 1, 4))
    expect(server.requests('storage').length).toBeGreaterThan(40)
    expect(server.connections).toBeLessThanOrEqual(12)
  })

  it('sends the token to the hub, and never to the storage', async () => {
    const { server, repo, options } = await hubWithPipeline()
    server.repos.set(ID, { ...repo, token: 'hf_secret' })
    await using checkpoint = await openTransformer({ ...options, token: 'hf_secret' })
    await readAll(checkpoint, slicesOf(checkpoint, 0, 2))
    expect(server.requests('storage').length).toBeGreaterThan(4)
    for (const { headers } of server.requests('storage')) expect(headers.authorization).toBeUndefined()
    for (const { headers } of server.requests('hub')) expect(headers.authorization).toBe('Bearer hf_secret')
  })

  it('leaves no weights in the cache', async () => {
    const { cacheDir, options } = await hubWithPipeline()
    await using checkpoint = await openTransformer(options)
    await readAll(checkpoint, slicesOf(checkpoint, 0, 2))
    const names = [...(await hashesOf(join(cacheDir, 'models--org--flux2-klein-tiny', 'snapshots'))).keys()]
    expect(names.map((name) => name.slice(41))).toEqual(['transformer/diffusion_pytorch_model.safetensors.index.json'])
  })

  it('reads a source again, and sources taken after the first read', async () => {
    const { options } = await hubWithPipeline()
    await using checkpoint = await openTransformer(options)
    const [first, second] = [...checkpoint.tensors.keys()] as [string, string]
    const source = checkpoint.source(first)
    const [once, again] = await Promise.all([source.read(), source.read()])
    expect(bytesOf(again)).toEqual(bytesOf(once))
    expect(again.data.buffer).not.toBe(once.data.buffer)
    await using local = await Checkpoint.open(referencePath('flux2-klein-tiny', 'transformer'))
    expect(bytesOf(await checkpoint.source(second).read())).toEqual(bytesOf(await local.read(second)))
    expect(source.ranges()).toBeUndefined()
    expect(source.file).toContain(`/${ID}/resolve/`)
  })

  it('reads in any order', async () => {
    const { options } = await hubWithPipeline()
    await using checkpoint = await HubCheckpoint.open(await HubRepository.open(ID, options), {
      ...TRANSFORMER,
      prefetchBytes: 1,
    })
    const slices = slicesOf(checkpoint, 1, 2)
    const next = random(1)
    const sources = slices.map(([name, part]) => checkpoint.source(name, part)).sort(() => next() - 0.5)
    const tensors = new Map<string, Tensor>()
    for (const source of sources) tensors.set(source.name, await source.read())
    await expectGolden(tensors, 1, 2)
  })

  it('refuses tensors and slices that are not there', async () => {
    const { options } = await hubWithPipeline()
    await using checkpoint = await openTransformer(options)
    const [name] = [...checkpoint.tensors.keys()] as [string]
    await expectCode(() => checkpoint.source('none'), 'TENSOR_NOT_FOUND', ID)
    await expectCode(() => checkpoint.source(name, { dim: 9, ranges: [] }), 'SHARD_SLICES', name)
  })
})

function indexBytes(server: HubServer): number {
  const index = server.requests('storage').find(({ range }) => range === undefined)
  return index?.bytes ?? 0
}

/** Bytes of the headers of the transformer's files. */
async function exactHeaderBytes(): Promise<number> {
  let total = 0
  for (const i of [1, 2, 3, 4]) {
    const file = await readFile(
      referencePath('flux2-klein-tiny', 'transformer', `diffusion_pytorch_model-0000${i}-of-00004.safetensors`),
    )
    total += 8 + Number(file.readBigUInt64LE(0))
  }
  return total
}

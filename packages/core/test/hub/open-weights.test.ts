import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { describe, expect, it } from 'vitest'
import { Checkpoint } from '../../src/checkpoint/index.ts'
import { HubCheckpoint, HubRepository, openWeights } from '../../src/hub/index.ts'
import { Tensor } from '../../src/index.ts'
import { writeSafetensors } from '../../src/save/index.ts'
import { expectCode, temporaryFolder } from '../checkpoint/files.ts'
import { hubWithPipeline, ID } from './hub-setup.ts'
import { openTransformer, TRANSFORMER } from './transformer-shards.ts'

describe('HubCheckpoint.open', () => {
  it('refuses what it cannot read', async () => {
    const { repo, options } = await hubWithPipeline()
    const repository = await HubRepository.open(ID, options)
    await expectCode(
      () => HubCheckpoint.open(repository, { subfolder: 'scheduler' }),
      'CHECKPOINT_NOT_FOUND',
      'scheduler',
    )
    await expectCode(
      () => HubCheckpoint.open(repository, { ...TRANSFORMER, weightsName: 'other' }),
      'CHECKPOINT_NOT_FOUND',
    )
    repo.files.delete('vae/diffusion_pytorch_model.safetensors')
    repo.files.set('vae/diffusion_pytorch_model.bin', Buffer.alloc(9))
    repo.files.delete('transformer/diffusion_pytorch_model-00002-of-00004.safetensors')
    const fresh = await HubRepository.open(ID, { ...options, cacheDir: await temporaryFolder() })
    await expectCode(() => HubCheckpoint.open(fresh, { subfolder: 'vae' }), 'CHECKPOINT_FORMAT', '.bin')
    await expectCode(() => HubCheckpoint.open(fresh, TRANSFORMER), 'HUB_NOT_FOUND', '00002-of-00004')
  })

  it('refuses headers that are malformed, or unlike the index', async () => {
    const { repo, options } = await hubWithPipeline()
    const part = (i: number) => `transformer/diffusion_pytorch_model-0000${i}-of-00004.safetensors`
    const [first, second] = [part(1), part(2)].map((path) => repo.files.get(path) as Buffer) as [Buffer, Buffer]
    const openFresh = async () => openTransformer({ ...options, cacheDir: await temporaryFolder() })
    repo.files.set(part(1), second)
    await expectCode(openFresh, 'CHECKPOINT_INDEX_MISMATCH', part(1))
    repo.files.set(part(1), first.subarray(0, 600_000))
    await expectCode(openFresh, 'SAFETENSORS_TRUNCATED', part(1))
    repo.files.set(part(1), Buffer.alloc(2000, 0xff))
    await expectCode(openFresh, 'SAFETENSORS_HEADER_LENGTH', part(1))
    repo.files.set(part(1), Buffer.alloc(5))
    await expectCode(openFresh, 'SAFETENSORS_TRUNCATED', part(1))
    repo.files.set(part(1), Buffer.alloc(0))
    await expectCode(openFresh, 'SAFETENSORS_TRUNCATED', part(1))
  })

  it.each(['../vae/diffusion_pytorch_model.safetensors', '/etc/model.safetensors'])(
    'refuses an index that names %s',
    async (name) => {
      const { repo, options } = await hubWithPipeline()
      const index = { weight_map: { weight: name } }
      repo.files.set('transformer/diffusion_pytorch_model.safetensors.index.json', Buffer.from(JSON.stringify(index)))
      await expectCode(() => openTransformer(options), 'HUB_FILE_NAME', ID)
    },
  )

  it('refuses to go online when it must not', async () => {
    const { options } = await hubWithPipeline()
    await (await HubRepository.open(ID, options)).download({ folders: ['transformer'], weights: false })
    await expectCode(() => openTransformer({ ...options, localFilesOnly: true }), 'HUB_OFFLINE', 'safetensors')
  })

  it('reads headers longer than the guess', async () => {
    const { repo, options } = await hubWithPipeline()
    const tensors = new Map<string, Tensor>()
    for (let i = 0; i < 2000; i++) tensors.set(`a_rather_long_name_of_a_weight.${i}`, Tensor.float32([1], [i]))
    const path = join(await temporaryFolder(), 'model.safetensors')
    await writeSafetensors(path, tensors)
    repo.files.set('big/model.safetensors', await readFile(path))
    const repository = await HubRepository.open(ID, options)
    await using checkpoint = await HubCheckpoint.open(repository, { subfolder: 'big', weightsName: 'model' })
    expect(checkpoint.tensors.size).toBe(2000)
    expect(checkpoint.stats.requests).toBe(2)
    const last = await checkpoint.source('a_rather_long_name_of_a_weight.1999').read()
    expect([...(last.data as Float32Array)]).toEqual([1999])
  })
})

describe('openWeights', () => {
  it('refuses modes and bounds that are none', async () => {
    const { options } = await hubWithPipeline()
    const repository = await HubRepository.open(ID, options)
    const mode = { ...TRANSFORMER, download: 'all' as 'shards' }
    await expectCode(() => openWeights(repository, mode), 'HUB_OPTION', 'all')
    for (const prefetchBytes of [-1, Number.NaN, 0.5]) {
      const shards = { ...TRANSFORMER, download: 'shards', prefetchBytes } as const
      await expectCode(() => openWeights(repository, shards), 'HUB_OPTION', 'prefetchBytes')
    }
  })

  it('offline says all that is missing', async () => {
    const { options } = await hubWithPipeline()
    await (await HubRepository.open(ID, options)).download({ folders: ['transformer'], weights: false })
    const repository = await HubRepository.open(ID, { ...options, localFilesOnly: true })
    const shards = { subfolder: 'transformer/', download: 'shards' } as const
    await expectCode(() => openWeights(repository, shards), 'HUB_OFFLINE', '00001-of-00004', '00004-of-00004')
  })

  it('reads weights that are in the cache from there, whatever the mode', async () => {
    const { server, options } = await hubWithPipeline()
    const repository = await HubRepository.open(ID, options)
    await using shards = await openWeights(repository, { ...TRANSFORMER, download: 'shards' })
    expect(shards).toBeInstanceOf(HubCheckpoint)
    await using whole = await openWeights(repository, TRANSFORMER)
    expect(whole).toBeInstanceOf(Checkpoint)
    expect(whole.location).toBe(join(repository.snapshot, 'transformer'))
    server.log.length = 0
    await using cached = await openWeights(repository, { ...TRANSFORMER, download: 'shards' })
    expect(cached).toBeInstanceOf(Checkpoint)
    const offline = await HubRepository.open(ID, { ...options, localFilesOnly: true })
    await using local = await openWeights(offline, { ...TRANSFORMER, download: 'shards' })
    expect(local).toBeInstanceOf(Checkpoint)
    expect(server.log).toEqual([])
  })
})

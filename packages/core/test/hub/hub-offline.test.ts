import { rm, symlink } from 'node:fs/promises'
import { dirname, join } from 'node:path'
import { describe, expect, it, vi } from 'vitest'
import { expectCode, temporaryFolder } from '../checkpoint/files.ts'
import { downloadPipeline, hubWithPipeline, ID } from './hub-setup.ts'

describe('offline', () => {
  it('uses the cache alone', async () => {
    const { server, repo, options } = await hubWithPipeline()
    const snapshot = await downloadPipeline(options)
    await server.stop()
    const offline = { ...options, env: { HF_HUB_OFFLINE: '1' } }
    expect(await downloadPipeline(offline)).toBe(snapshot)
    expect(await downloadPipeline({ ...options, localFilesOnly: true, revision: repo.commit })).toBe(snapshot)
    // A snapshot of an older huggingface_hub has no listing.
    await rm(join(dirname(dirname(snapshot)), 'trees'), { recursive: true })
    expect(await downloadPipeline(offline)).toBe(snapshot)
  })

  it.each([true, false])('says all that is missing, with a listing: %s', async (hasTree) => {
    const { options } = await hubWithPipeline()
    const snapshot = await downloadPipeline(options)
    if (!hasTree) await rm(join(dirname(dirname(snapshot)), 'trees'), { recursive: true })
    await rm(join(snapshot, 'transformer/diffusion_pytorch_model-00002-of-00004.safetensors'))
    await rm(join(snapshot, 'transformer/diffusion_pytorch_model-00004-of-00004.safetensors'))
    const offline = { ...options, localFilesOnly: true }
    await expectCode(
      () => downloadPipeline(offline),
      'HUB_OFFLINE',
      '00002-of-00004',
      '00004-of-00004',
      'localFilesOnly',
    )
    await rm(join(snapshot, 'model_index.json'))
    await rm(join(snapshot, 'scheduler'), { recursive: true })
    await expectCode(() => downloadPipeline(offline), 'HUB_OFFLINE', 'model_index.json', 'scheduler/')
  })

  it('says that a revision is not in the cache', async () => {
    const { server, options } = await hubWithPipeline()
    await expectCode(() => downloadPipeline({ ...options, localFilesOnly: true }), 'HUB_OFFLINE', ID, 'revision main')
    await downloadPipeline(options)
    const unknown = { ...options, localFilesOnly: true, revision: 'v9' }
    await expectCode(() => downloadPipeline(unknown), 'HUB_OFFLINE', 'revision v9')
    server.log.length = 0
    await downloadPipeline({ ...options, localFilesOnly: true })
    expect(server.log).toEqual([])
  })

  it('takes the cached commit, with a warning, when the hub cannot be reached', async () => {
    const { server, repo, options } = await hubWithPipeline()
    const snapshot = await downloadPipeline(options)
    await server.stop()
    const warn = vi.spyOn(process, 'emitWarning').mockImplementation(() => undefined)
    try {
      expect(await downloadPipeline(options)).toBe(snapshot)
      const text = expect.stringContaining(repo.commit)
      expect(warn).toHaveBeenCalledWith(text, expect.objectContaining({ code: 'HUB_UNREACHABLE' }))
    } finally {
      warn.mockRestore()
    }
    const fresh = { ...options, cacheDir: await temporaryFolder() }
    await expectCode(() => downloadPipeline(fresh), 'HUB_NETWORK', ID, 'ECONNREFUSED', 'attempts 6')
  })

  it('does not take what a link of the cache has lost for a file', async () => {
    const { options } = await hubWithPipeline()
    const snapshot = await downloadPipeline(options)
    await rm(join(snapshot, 'vae', 'config.json'))
    await symlink('../../../blobs/gone', join(snapshot, 'vae', 'config.json'))
    await expectCode(() => downloadPipeline({ ...options, localFilesOnly: true }), 'HUB_OFFLINE', 'vae/config.json')
  })
})

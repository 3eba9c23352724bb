import { readFile, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { describe, expect, it } from 'vitest'
import { Tensor, writeSafetensors } from '../../src/index.ts'
import { ReferenceBackend } from '../../src/reference/index.ts'
import { temporaryFolder } from '../checkpoint/files.ts'
import { Mlp, mlpWeights } from '../mlp-model.ts'
import { hubWithPipeline, ID } from './hub-setup.ts'

const x = Tensor.float32([1, 4], [1, 2, 3, 4])

/** A hub whose repository has an `Mlp` in the folder `mlp`, and the same in a local folder. */
async function hubWithMlp() {
  const { repo, options } = await hubWithPipeline()
  const folder = await temporaryFolder()
  await writeFile(join(folder, 'config.json'), '{}')
  const file = join(folder, 'diffusion_pytorch_model.safetensors')
  await writeSafetensors(file, mlpWeights())
  repo.files.set('mlp/config.json', Buffer.from('{}'))
  repo.files.set('mlp/diffusion_pytorch_model.safetensors', await readFile(file))
  const { cacheDir, endpoint, token } = options
  return { folder, hub: { subfolder: 'mlp', cacheDir, endpoint, ...(token === undefined ? {} : { token }) } }
}

describe('fromPretrained by an id', () => {
  it.each(['snapshot', 'shards'] as const)('loads the same model as from a folder (%s)', async (download) => {
    const { folder, hub } = await hubWithMlp()
    const backend = new ReferenceBackend()
    const local = await Mlp.fromPretrained(folder, { backend })
    const remote = await Mlp.fromPretrained(ID, { ...hub, backend, download })
    expect(await remote.run(x)).toEqual(await local.run(x))
  })

  it('says what a repository is that has no model', async () => {
    const { repo, options } = await hubWithPipeline()
    repo.files.set('lora/pytorch_lora_weights.safetensors', Buffer.alloc(2000))
    repo.files.set('archive/flux.dduf', Buffer.alloc(2000))
    repo.files.set('nothing/README.md', Buffer.alloc(10))
    const { cacheDir, endpoint } = options as { cacheDir: string; endpoint: string }
    const hub = { cacheDir, endpoint, token: false as const, backend: new ReferenceBackend() }
    const codes = { lora: 'ADAPTERS_UNSUPPORTED', archive: 'CHECKPOINT_FORMAT', nothing: 'HUB_NOT_FOUND' }
    for (const [subfolder, code] of Object.entries(codes)) {
      await expect(Mlp.fromPretrained(ID, { ...hub, subfolder })).rejects.toMatchObject({ code })
    }
  })

  it('finds what is cached when it is offline, and says what is not', async () => {
    const { hub } = await hubWithMlp()
    const backend = new ReferenceBackend()
    const offline = { ...hub, backend, localFilesOnly: true }
    await expect(Mlp.fromPretrained(ID, offline)).rejects.toMatchObject({ code: 'HUB_OFFLINE' })
    const online = await Mlp.fromPretrained(ID, { ...hub, backend })
    const again = await Mlp.fromPretrained(ID, offline)
    expect(await again.run(x)).toEqual(await online.run(x))
  })
})

import { lstat, readFile, readlink, rename, rm, truncate, writeFile } from 'node:fs/promises'
import { dirname, join } from 'node:path'
import { describe, expect, it } from 'vitest'
import { type DownloadProgress, HubRepository } from '../../src/hub/index.ts'
import { expectCode, temporaryFolder } from '../checkpoint/files.ts'
import { gitOid, type HubRepo, type HubServer, sha256 } from './hub-server.ts'
import { downloadPipeline, hashes, hashesOf, hubWithPipeline, ID, leftovers, PIPELINE } from './hub-setup.ts'

describe('HubRepository.download', () => {
  it('lays the cache out as huggingface_hub does', async () => {
    const { server, repo, cacheDir, options } = await hubWithPipeline()
    const snapshot = await downloadPipeline(options)
    const folder = join(cacheDir, 'models--org--flux2-klein-tiny')
    expect(snapshot).toBe(join(folder, 'snapshots', repo.commit))
    expect(await hashesOf(snapshot)).toEqual(hashes(repo.files))
    for (const [path, content] of repo.files) {
      const pointer = join(snapshot, path)
      expect((await lstat(pointer)).isSymbolicLink()).toBe(true)
      const oid = content.length >= server.lfsFrom ? sha256(content) : gitOid(content)
      const up = path.includes('/') ? '../../../' : '../../'
      expect(await readlink(pointer)).toBe(`${up}blobs/${oid}`)
    }
    expect(await readFile(join(folder, 'refs', 'main'), 'utf8')).toBe(repo.commit)
    const tree = JSON.parse(await readFile(join(folder, 'trees', `${repo.commit}.json`), 'utf8'))
    expect(tree.format_version).toBe(1)
    expect(tree.files['model_index.json']).toEqual({ size: 442, blob_id: gitOid(fileOf(repo, 'model_index.json')) })
    expect(tree.files['vae/diffusion_pytorch_model.safetensors']).toMatchObject({
      lfs_sha256: sha256(fileOf(repo, 'vae/diffusion_pytorch_model.safetensors')),
      lfs_size: 543316,
    })
    expect(await leftovers(cacheDir)).toEqual([])
  })

  it('fetches each file once, and nothing when all is there', async () => {
    const { server, repo, options } = await hubWithPipeline()
    await downloadPipeline(options)
    const small = [...repo.files.values()].filter(({ length }) => length < server.lfsFrom)
    expect(server.requests('storage')).toHaveLength(repo.files.size - small.length)
    const size = [...repo.files.values()].reduce((sum, { length }) => sum + length, 0)
    expect(server.bytes('storage') + server.bytes('hub')).toBe(size)
    server.log.length = 0
    await downloadPipeline(options)
    // The commit of a branch is asked for again; its listing never changes.
    expect(server.log.map(({ path }) => path)).toEqual([`/api/models/${ID}/revision/main`])
    server.log.length = 0
    await downloadPipeline({ ...options, revision: repo.commit })
    expect(server.log).toEqual([])
  })

  it('fetches only what is needed, and never weights in other formats', async () => {
    const { server, repo, options } = await hubWithPipeline()
    const unwanted = [
      'flux2-klein.safetensors',
      'README.md',
      'text_encoder/pytorch_model.bin',
      'text_encoder/model.fp16.safetensors',
      'text_encoder/model.onnx',
      'transformer/diffusion_pytorch_model.safetensors',
      'transformer/diffusion_pytorch_model.bin',
      'transformer/diffusion_pytorch_model.fp16.safetensors.index.json',
      'transformer/model.ckpt',
      'transformer/other-00001-of-00001.safetensors',
      'vae/diffusion_pytorch_model.pt',
      'vae/extra/config.json',
      'safety_checker/config.json',
    ]
    for (const path of unwanted) repo.files.set(path, Buffer.alloc(5000, path))
    const snapshot = await downloadPipeline(options)
    for (const path of unwanted) expect(fetched(server), path).not.toContain(path)
    const wanted = new Map([...repo.files].filter(([path]) => !unwanted.includes(path)))
    expect(await hashesOf(snapshot)).toEqual(hashes(wanted))
  })

  it('takes weights of the root, by their names', async () => {
    const { repo, options } = await hubWithPipeline()
    for (const path of [...repo.files.keys()]) {
      const content = fileOf(repo, path)
      repo.files.delete(path)
      if (path.startsWith('vae/')) repo.files.set(path.slice('vae/'.length), content)
    }
    repo.files.set('ae.safetensors', Buffer.alloc(5000))
    const repository = await HubRepository.open(ID, options)
    const snapshot = await repository.download({ folders: [''] })
    expect([...(await hashesOf(snapshot)).keys()]).toEqual(['config.json', 'diffusion_pytorch_model.safetensors'])
  })

  it('leaves weights out when asked to', async () => {
    const { server, options } = await hubWithPipeline()
    const repository = await HubRepository.open(ID, options)
    const snapshot = await repository.download({ ...PIPELINE, weights: false })
    expect([...(await hashesOf(snapshot)).keys()].filter((path) => path.endsWith('.safetensors'))).toEqual([])
    expect(fetched(server).filter((path) => path.includes('safetensors'))).toEqual([
      'transformer/diffusion_pytorch_model.safetensors.index.json',
    ])
  })

  it('reports progress with totals that do not change', async () => {
    const { repo, options } = await hubWithPipeline()
    const seen: DownloadProgress[] = []
    const repository = await HubRepository.open(ID, options)
    await repository.download(PIPELINE, { onProgress: (progress) => seen.push(progress) })
    const totalBytes = [...repo.files.values()].reduce((sum, { length }) => sum + length, 0)
    const last = { component: ID, loadedBytes: totalBytes, totalBytes, loadedFiles: 16, totalFiles: 16 }
    expect(seen.at(-1)).toEqual(last)
    expect(new Set(seen.map((progress) => progress.totalBytes))).toEqual(new Set([totalBytes]))
    expect(seen.map(({ loadedBytes }) => loadedBytes)).toEqual(
      seen.map(({ loadedBytes }) => loadedBytes).sort((a, b) => a - b),
    )
    seen.length = 0
    await repository.download(PIPELINE, { onProgress: (progress) => seen.push(progress) })
    expect(seen.at(-1)).toEqual(last)
  })

  it('reads listings of many pages', async () => {
    const { server, options } = await hubWithPipeline()
    server.pageSize = 3
    const repository = await HubRepository.open(ID, options)
    expect(repository.files.size).toBe(16)
    expect(server.requests('api', '/tree/')).toHaveLength(6)
  })

  it('follows a branch to its new commit, and shares what did not change', async () => {
    const { server, repo, options } = await hubWithPipeline()
    await downloadPipeline(options)
    const files = new Map(repo.files).set('scheduler/scheduler_config.json', Buffer.from('{"new": true}'))
    server.repos.set(ID, { commit: 'b'.repeat(40), files })
    server.log.length = 0
    const snapshot = await downloadPipeline(options)
    expect(await hashesOf(snapshot)).toEqual(hashes(files))
    expect(server.bytes('hub') + server.bytes('storage')).toBe('{"new": true}'.length)
  })

  it('downloads again what was cut or lost', async () => {
    const { repo, options } = await hubWithPipeline()
    const snapshot = await downloadPipeline(options)
    const blob = join(snapshot, dirname('vae/x'), await readlink(join(snapshot, 'vae/config.json')))
    await truncate(blob, 3)
    await rm(join(snapshot, 'model_index.json'))
    await downloadPipeline(options)
    expect(await hashesOf(snapshot)).toEqual(hashes(repo.files))
  })

  it('uses a cache that it cannot write to', async () => {
    const { repo, cacheDir, options } = await hubWithPipeline()
    await downloadPipeline(options)
    // Files in the place of folders: unlike permissions, they stop root as well.
    const folder = join(cacheDir, 'models--org--flux2-klein-tiny')
    for (const name of ['refs', 'trees']) {
      await rename(join(folder, name), join(folder, `${name}-before`))
      await writeFile(join(folder, name), '')
    }
    expect(await hashesOf(await downloadPipeline(options))).toEqual(hashes(repo.files))
  })

  it('names the folder that it cannot write to', async () => {
    const { options } = await hubWithPipeline()
    const cacheDir = join(await temporaryFolder(), 'file')
    await writeFile(cacheDir, '')
    await expectCode(() => downloadPipeline({ ...options, cacheDir }), 'HUB_CACHE', cacheDir, 'ENOTDIR')
  })

  it('refuses a download that does not fit the disk before it starts', async () => {
    const { server, options } = await hubWithPipeline()
    server.tamper = (entries) =>
      entries.map((entry) => ({ ...entry, ...(entry.path === 'vae/config.json' ? { size: 2 ** 52 } : {}) }))
    await expectCode(
      () => downloadPipeline(options),
      'HUB_DISK_FULL',
      `neededBytes ${2 ** 52}`.slice(0, 14),
      'freeBytes',
    )
    expect(server.bytes('storage')).toBeLessThan(10_000)
  })

  it('can be aborted, and goes on where it was', async () => {
    const { server, repo, cacheDir, options } = await hubWithPipeline()
    const controller = new AbortController()
    server.fault = ({ kind, path }) => {
      if (kind !== 'storage' || !path.includes(sha256(fileOf(repo, 'text_encoder/model.safetensors')))) return undefined
      setTimeout(() => controller.abort(), 50)
      return { kind: 'hang', after: 1_000_000 }
    }
    const before = performance.now()
    await expectCode(() => downloadPipeline({ ...options, signal: controller.signal }), 'ABORTED')
    expect(performance.now() - before).toBeLessThan(2000)
    expect(await leftovers(cacheDir)).not.toContainEqual(expect.stringMatching(/\.lock$/))
    server.fault = () => undefined
    server.log.length = 0
    expect(await hashesOf(await downloadPipeline(options))).toEqual(hashes(repo.files))
    const resumed = server.requests('storage', sha256(fileOf(repo, 'text_encoder/model.safetensors')))
    expect(resumed.map(({ range }) => range)).toEqual([expect.stringMatching(/^bytes=[1-9]\d*-1598695$/)])
    expect(await leftovers(cacheDir)).toEqual([])
  })
})

describe('HubRepository.open', () => {
  it('says that there is no such repository, or that a token is missing', async () => {
    const { server, repo, options } = await hubWithPipeline()
    await expectCode(
      () => HubRepository.open('org/unknown', options),
      'HUB_UNAUTHORIZED',
      'org/unknown',
      'status 401',
      'HF_TOKEN',
    )
    const withToken = { ...options, token: 'hf_other' }
    await expectCode(() => HubRepository.open('org/unknown', withToken), 'HUB_NOT_FOUND', 'org/unknown', 'status 404')
    server.repos.set(ID, { ...repo, token: 'hf_secret' })
    await expectCode(() => HubRepository.open(ID, options), 'HUB_UNAUTHORIZED', ID, 'none sent')
    const repository = await HubRepository.open(ID, { ...options, token: 'hf_secret' })
    expect(repository.files.size).toBe(16)
  })

  it('says where to ask for access to a gated repository', async () => {
    const { server, repo, options } = await hubWithPipeline()
    server.repos.set(ID, { ...repo, gated: true })
    await expectCode(() => HubRepository.open(ID, options), 'HUB_UNAUTHORIZED', 'GatedRepo', `${server.endpoint}/${ID}`)
  })

  it('says that a revision, a folder or a file is not there', async () => {
    const { options } = await hubWithPipeline()
    const unknown = { ...options, revision: 'v9' }
    await expectCode(() => HubRepository.open(ID, unknown), 'HUB_NOT_FOUND', 'no such revision', 'status 404')
    const repository = await HubRepository.open(ID, options)
    const selection = { files: ['none.json'], folders: ['unet', 'vae'] }
    await expectCode(() => repository.download(selection), 'HUB_NOT_FOUND', 'none.json', 'unet/', repository.commit)
  })

  it('says which files of an index are not there', async () => {
    const { repo, options } = await hubWithPipeline()
    repo.files.delete('transformer/diffusion_pytorch_model-00003-of-00004.safetensors')
    await expectCode(() => downloadPipeline(options), 'HUB_NOT_FOUND', 'model-00003-of-00004')
  })

  it.each(['../../evil.json', '/etc/evil.json', 'vae/..', 'vae\\..\\evil.json', 'evil\0.json', 'C:/evil.json'])(
    'refuses a repository with a file named %j',
    async (path) => {
      const { server, cacheDir, options } = await hubWithPipeline()
      server.tamper = (entries) => [...entries, { type: 'file', path, size: 3, oid: gitOid(Buffer.from('abc')) }]
      await expectCode(() => downloadPipeline(options), 'HUB_FILE_NAME', ID)
      expect(await hashesOf(cacheDir)).toEqual(new Map())
    },
  )

  it.each([
    { oid: '../../evil' },
    { oid: undefined },
    { oid: 'A'.repeat(40) },
    { size: -1 },
    { size: 0.5 },
    { size: '12' },
    { lfs: { oid: 'a'.repeat(40), size: 3 } },
    { lfs: { oid: `${'a'.repeat(62)}/x`, size: 3 } },
  ])('refuses a listing with %j', async (change) => {
    const { server, options } = await hubWithPipeline()
    server.tamper = (entries) => entries.map((entry) => (entry.type === 'file' ? { ...entry, ...change } : entry))
    await expectCode(() => downloadPipeline(options), 'HUB_RESPONSE', ID)
  })

  it.each([['text'], [{}], [null], [[null]], [[7]]])('refuses the listing %j', async (listing) => {
    const { server, options } = await hubWithPipeline()
    server.tamper = () => listing
    const error = await downloadPipeline(options).catch((thrown: { code: string }) => thrown)
    expect(error).toHaveProperty('code', expect.stringMatching(/^HUB_(RESPONSE|FILE_NAME|NOT_FOUND)$/))
  })

  it('refuses a listing without end', async () => {
    const { server, options } = await hubWithPipeline()
    server.pageSize = 0
    await expectCode(() => HubRepository.open(ID, options), 'HUB_RESPONSE', 'no end')
  })
})

/** Paths of the files that were asked for. */
function fetched(server: HubServer): readonly string[] {
  return server.requests('hub').map(({ path }) => path.replace(/^.*\/resolve\/\w+\//, ''))
}

function fileOf({ files }: HubRepo, path: string): Buffer {
  const content = files.get(path)
  if (content === undefined) throw new Error(`no ${path}`)
  return content
}

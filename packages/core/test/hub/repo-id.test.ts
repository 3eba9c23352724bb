import { mkdir, writeFile } from 'node:fs/promises'
import { join, posix, win32 } from 'node:path'
import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { checkFileName, checkRepoId, checkRevision, isRepoId } from '../../src/hub/repo-id.ts'
import { expectCode, temporaryFolder } from '../checkpoint/files.ts'

describe('isRepoId', () => {
  it('takes what exists, and what can only be a path, for a folder', async () => {
    const folder = await temporaryFolder()
    for (const path of [folder, '/not/there', './org/name', '../org/name', '.', '..', '.\\name']) {
      expect(await isRepoId(path), path).toBe(false)
    }
  })

  it('prefers an existing folder or file to an id of the same name', async () => {
    const folder = await temporaryFolder()
    await mkdir(join(folder, 'org', 'name'), { recursive: true })
    const before = process.cwd()
    process.chdir(folder)
    try {
      await writeFile('org/model.gguf', '')
      await writeFile('flux.dduf', '')
      for (const path of ['org/name', 'org/model.gguf', 'flux.dduf']) expect(await isRepoId(path), path).toBe(false)
      expect(await isRepoId('org/other')).toBe(true)
    } finally {
      process.chdir(before)
    }
  })

  it.each(['black-forest-labs/FLUX.2-klein-4B', 'a/b', '0x/_y', `org/${'n'.repeat(92)}`])(
    'takes %s for an id',
    async (id) => {
      expect(await isRepoId(id)).toBe(true)
    },
  )

  it.each([
    '',
    'name',
    'org/name/more',
    'org/',
    '/name/',
    'org//name',
    'org/na me',
    'org/-name',
    'org/name.',
    'org/a--b',
    'org/a..b',
    'org/name.git',
    'org/na\0me',
    'datasets/org/name',
    `org/${'n'.repeat(93)}`,
    'org/name?x=1',
    'org/%2e%2e',
  ])('refuses %j', async (id) => {
    if (id !== '/name/') await expectCode(() => isRepoId(id), 'HUB_ID_INVALID', 'org/name')
    await expectCode(() => checkRepoId(id), 'HUB_ID_INVALID')
  })
})

describe('checkRevision', () => {
  it.each(['main', 'v1.0', 'refs/pr/12', 'a'.repeat(40), 'feature/x_y-z'])('takes %s', (revision) => {
    checkRevision('org/name', revision)
  })

  it.each(['', '..', 'a/../b', '/etc', 'a\\b', 'a\0', 'a b', 'x.lock', '.hidden', 'a//b', 'a?b', 'C:x'])(
    'refuses %j',
    async (revision) => {
      await expectCode(() => checkRevision('org/name', revision), 'HUB_REVISION_INVALID', 'org/name')
    },
  )
})

describe('checkFileName', () => {
  it.each(['config.json', 'vae/config.json', 'a/b/c.d-e_f', '.gitattributes', 'ünï.txt', '..a/b..'])(
    'takes %s',
    (name) => {
      checkFileName('org/name', name)
    },
  )

  it.each([
    '..',
    '../x',
    'a/../../x',
    '/etc/passwd',
    'a//b',
    'a/',
    './a',
    'a\0b',
    'a\nb',
    'C:\\x',
    'C:x',
    'a\\..\\b',
    'a/C:x',
    '\\\\host\\share',
    '',
    undefined,
    7,
  ])('refuses %j', async (name) => {
    await expectCode(() => checkFileName('org/name', name), 'HUB_FILE_NAME', 'org/name')
  })

  it('lets no name leave the folder, on any platform', () => {
    const part = fc.constantFrom('..', '.', '', 'a', 'b.json', 'C:', '/', '\\', '\0', '~', '...', ' ')
    fc.assert(
      fc.property(fc.array(part, { maxLength: 6 }), fc.constantFrom('/', '\\', ''), (parts, separator) => {
        const name = parts.join(separator)
        try {
          checkFileName('org/name', name)
        } catch {
          return
        }
        expect(posix.join('/snapshot', name).startsWith('/snapshot/')).toBe(true)
        expect(win32.join('C:\\snapshot', name).startsWith('C:\\snapshot\\')).toBe(true)
        expect(win32.isAbsolute(name)).toBe(false)
      }),
      { numRuns: 3000 },
    )
  })
})

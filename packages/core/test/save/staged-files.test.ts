import { mkdir, readdir, readFile, writeFile } from 'node:fs/promises'
import { basename, join } from 'node:path'
import { beforeEach, describe, expect, test, vi } from 'vitest'
import { replacedFiles, StagedFiles } from '../../src/save/staged-files.ts'
import { expectCode, temporaryFolder } from '../checkpoint/files.ts'
import { snapshot } from './folders.ts'

/** Which moves were made, and which of them are to fail. */
const moves = vi.hoisted(() => ({ made: [] as [from: string, to: string][], failing: [] as number[] }))

vi.mock('node:fs/promises', async (importOriginal) => {
  const original = await importOriginal<typeof import('node:fs/promises')>()
  return {
    ...original,
    rename: async (from: string, to: string) => {
      const i = moves.made.push([from, to]) - 1
      if (moves.failing.includes(i)) throw Object.assign(new Error('EACCES: permission denied'), { code: 'EACCES' })
      return original.rename(from, to)
    },
  }
})

beforeEach(() => {
  moves.made = []
  moves.failing = []
})

const OLD = ['m.safetensors.index.json', 'm-00001-of-00002.safetensors', 'm-00002-of-00002.safetensors', 'config.json']
const NEW = ['config.json', 'm-00001-of-00002.safetensors', 'm-00002-of-00002.safetensors', 'm.safetensors.index.json']

/** A folder with an old save and a new one that is staged. */
async function stagedSave(): Promise<{ folder: string; staged: StagedFiles }> {
  const folder = await temporaryFolder()
  for (const name of OLD) await writeFile(join(folder, name), `old ${name}`)
  const staged = new StagedFiles(folder, 'test')
  await staged.prepare()
  for (const name of NEW) await writeFile(staged.path(name), `new ${name}`)
  return { folder, staged }
}

test('the file that readers start from leaves first and comes last', async () => {
  const { folder, staged } = await stagedSave()
  await staged.commit(await replacedFiles(folder, 'm', 'whole'), NEW)
  expect(moves.made.map(([from]) => basename(from))).toEqual([
    'm.safetensors.index.json',
    'm-00001-of-00002.safetensors',
    'm-00002-of-00002.safetensors',
    'config.json',
    ...NEW,
  ])
  expect((await readdir(folder)).sort()).toEqual([...NEW].sort())
  for (const name of NEW) expect(await readFile(join(folder, name), 'utf8')).toBe(`new ${name}`)
})

describe('when a move fails', () => {
  test.each(Array.from({ length: OLD.length + NEW.length }, (_, i) => i))(
    '(number %i) nothing has changed',
    async (i) => {
      const { folder, staged } = await stagedSave()
      const before = new Map([...(await snapshot(folder))].filter(([path]) => !path.startsWith('.rankwise')))
      moves.failing = [i]
      await expectCode(() => staged.commit(OLD, NEW), 'SAVE_FAILED', 'EACCES', 'save to a folder')
      await staged.discard()
      expect(await snapshot(folder)).toEqual(before)
    },
  )

  test('and so does moving back, what was replaced is kept and named', async () => {
    const { folder, staged } = await stagedSave()
    moves.failing = [6, 7]
    await expectCode(() => staged.commit(OLD, NEW), 'SAVE_ROLLBACK', staged.stage, 'EACCES')
    await staged.discard()
    const kept = [...(await snapshot(folder)).values()].map((content) => Buffer.from(content, 'base64').toString())
    for (const name of OLD) expect(kept).toContain(`old ${name}`)
  })
})

describe('discarding', () => {
  test('removes the folders that were made, and no others', async () => {
    const parent = await temporaryFolder()
    await mkdir(join(parent, 'there'))
    const staged = new StagedFiles(join(parent, 'there', 'a', 'b'), 'test')
    await staged.prepare()
    await writeFile(staged.path('file'), 'staged')
    expect(await readdir(join(parent, 'there', 'a', 'b'))).toEqual(['.rankwise-save-test'])
    await staged.discard()
    expect(await readdir(parent)).toEqual(['there'])
    expect(await readdir(join(parent, 'there'))).toEqual([])
    await staged.discard()
  })

  test('leaves a folder in which there is something else by now', async () => {
    const parent = await temporaryFolder()
    const staged = new StagedFiles(join(parent, 'a', 'b'), 'test')
    await staged.prepare()
    await writeFile(join(parent, 'a', 'other'), 'mine')
    await staged.discard()
    expect(await snapshot(parent)).toEqual(
      new Map([
        ['a', 'folder'],
        ['a/other', Buffer.from('mine').toString('base64')],
      ]),
    )
  })
})

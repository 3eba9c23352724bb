import { describe, expect, it } from 'vitest'
import { referencePath } from '../../../fixtures/src/reference.ts'
import { openPretrained } from '../../src/hub/index.ts'
import { expectCode } from '../checkpoint/files.ts'
import { hubWithPipeline, ID, PIPELINE } from './hub-setup.ts'

describe('openPretrained', () => {
  it('leaves folders to the loader', async () => {
    const { server, options } = await hubWithPipeline()
    expect(await openPretrained(referencePath('flux2-klein-tiny'), options)).toBeUndefined()
    expect(await openPretrained('./not/there', options)).toBeUndefined()
    expect(server.log).toEqual([])
  })

  it('refuses what is neither folder nor id', async () => {
    await expectCode(() => openPretrained('nothing', {}), 'HUB_ID_INVALID', 'nothing')
  })

  it('gives all ranks the commit of rank 0, though the branch moves on', async () => {
    const { server, repo, options } = await hubWithPipeline()
    const first = await openPretrained(ID, options)
    await first?.download(PIPELINE)
    server.repos.set(ID, { commit: 'b'.repeat(40), files: new Map() })
    server.log.length = 0
    for (let rank = 1; rank < 4; rank++) {
      const repository = await openPretrained(ID, { ...options, fromFirst: async () => repo.commit })
      expect(repository?.commit).toBe(repo.commit)
      expect(await repository?.download(PIPELINE)).toBe(first?.snapshot)
    }
    expect(server.log).toEqual([])
  })

  it('tells the commit that rank 0 found, or fails there as it did', async () => {
    const { repo, options } = await hubWithPipeline()
    const told: string[] = []
    const fromFirst = async (work: () => Promise<string>) => {
      told.push(await work())
      return told[0] as string
    }
    await openPretrained(ID, { ...options, fromFirst })
    expect(told).toEqual([repo.commit])
    await expectCode(() => openPretrained(ID, { ...options, revision: 'v9', fromFirst }), 'HUB_NOT_FOUND', 'revision')
  })
})

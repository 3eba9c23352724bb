import { describe, expect, it } from 'vitest'
import { referencePath } from '../../../fixtures/src/reference.ts'
import type { Collectives } from '../../src/collectives.ts'
import { RankwiseError } from '../../src/errors.ts'
import { openPretrained } from '../../src/hub/index.ts'
import type { Tensor } from '../../src/tensor.ts'
import { expectCode } from '../checkpoint/files.ts'
import { hubWithPipeline, ID, PIPELINE } from './hub-setup.ts'

/** Ranks in one process that can broadcast once. */
function broadcastGroup(worldSize: number): readonly Collectives[] {
  let send: (tensor: Tensor) => void = () => {}
  const sent = new Promise<Tensor>((resolve) => {
    send = resolve
  })
  const member = (rank: number): Pick<Collectives, 'rank' | 'worldSize' | 'broadcast'> => ({
    rank,
    worldSize,
    async broadcast(tensor) {
      if (rank === 0) send(tensor)
      else (tensor.data as Uint8Array).set((await sent).data as Uint8Array)
    },
  })
  return Array.from({ length: worldSize }, (_, rank) => member(rank) as Collectives)
}

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
    const [zero, ...others] = broadcastGroup(4) as [Collectives, ...Collectives[]]
    const first = await openPretrained(ID, { ...options, collectives: zero })
    await first?.download(PIPELINE)
    server.repos.set(ID, { commit: 'b'.repeat(40), files: new Map() })
    server.log.length = 0
    for (const collectives of others) {
      const repository = await openPretrained(ID, { ...options, collectives })
      expect(repository?.commit).toBe(repo.commit)
      expect(await repository?.download(PIPELINE)).toBe(first?.snapshot)
    }
    expect(server.log).toEqual([])
  })

  it('fails on all ranks with the error of rank 0', async () => {
    const { options } = await hubWithPipeline()
    const group = broadcastGroup(3)
    const errors = await Promise.all(
      group.map((collectives) =>
        openPretrained(ID, { ...options, revision: 'v9', collectives }).catch((error: unknown) => error),
      ),
    )
    for (const error of errors) {
      expect(error).toBeInstanceOf(RankwiseError)
      expect(error).toMatchObject({ code: 'HUB_NOT_FOUND', message: expect.stringContaining('no such revision') })
    }
    expect(errors[1]).toMatchObject({ message: expect.stringContaining('rank 0') })
  })
})

import { afterEach, describe, expect, test } from 'vitest'
import type { Collectives, CollectivesFactory, Rendezvous } from '../src/collectives.ts'
import { getProcessGroup, initProcessGroup, registerCollectives } from '../src/process-group.ts'

const ENV = {
  RANK: '1',
  WORLD_SIZE: '4',
  LOCAL_RANK: '1',
  LOCAL_WORLD_SIZE: '2',
  MASTER_ADDR: '127.0.0.1',
  MASTER_PORT: '29500',
}

/** Collectives that only know their place, and what happened to them. */
class RecordedCollectives implements Collectives {
  readonly name = 'recorded'
  readonly rank: number
  readonly worldSize: number
  readonly rendezvous: Rendezvous
  destroyed = 0

  constructor(rendezvous: Rendezvous) {
    this.rank = rendezvous.rank
    this.worldSize = rendezvous.worldSize
    this.rendezvous = rendezvous
  }

  allReduce = unexpected
  allGather = unexpected
  reduceScatter = unexpected
  broadcast = unexpected
  barrier = unexpected
  abort = () => {}

  async destroy(): Promise<void> {
    this.destroyed += 1
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.destroy()
  }
}

function unexpected(): Promise<never> {
  throw new Error('not part of this test')
}

const factory: CollectivesFactory = async (rendezvous) => new RecordedCollectives(rendezvous)
registerCollectives('recorded', factory)
registerCollectives('failing', async () => {
  throw new Error('no peers')
})
registerCollectives('stuck', async (rendezvous) => {
  const collectives = new RecordedCollectives(rendezvous)
  collectives.destroy = async () => {
    throw new Error('stuck')
  }
  return collectives
})

afterEach(() => getProcessGroup()?.destroy())

describe('initProcessGroup', () => {
  test('joins and becomes the default group', async () => {
    expect(getProcessGroup()).toBeUndefined()
    const group = await initProcessGroup({ backend: 'recorded', env: ENV })
    expect(group).toMatchObject({ rank: 1, worldSize: 4, localRank: 1, localWorldSize: 2 })
    expect(getProcessGroup()).toBe(group)
  })

  test('the timeout of the caller wins over the environment', async () => {
    const env = { ...ENV, RANKWISE_TIMEOUT_MS: '7000' }
    const timeoutOf = async (options: { timeoutMs?: number }) => {
      await using group = await initProcessGroup({ backend: 'recorded', env, ...options })
      return (group.collectives as RecordedCollectives).rendezvous.timeoutMs
    }
    expect(await timeoutOf({})).toBe(7000)
    expect(await timeoutOf({ timeoutMs: 9 })).toBe(9)
  })

  test('options reach the collectives as they are', async () => {
    const given: (object | undefined)[] = []
    registerCollectives('curious', async (rendezvous, options) => {
      given.push(options)
      return new RecordedCollectives(rendezvous)
    })
    const options = { transport: 'tcp' }
    for (const passed of [{ options }, {}]) {
      await using group = await initProcessGroup({ backend: 'curious', env: ENV, ...passed })
      expect(group.rank).toBe(1)
    }
    expect(given).toEqual([options, {}])
  })

  test('leaving clears the default group and destroys the collectives', async () => {
    const group = await initProcessGroup({ backend: 'recorded', env: ENV })
    await group[Symbol.asyncDispose]()
    expect(getProcessGroup()).toBeUndefined()
    expect(group.collectives).toMatchObject({ destroyed: 1 })
    const next = await initProcessGroup({ backend: 'recorded', env: ENV })
    await group.destroy()
    expect(getProcessGroup()).toBe(next)
  })

  test('a second group is refused, also while the first is joining', async () => {
    const first = initProcessGroup({ backend: 'recorded', env: ENV })
    const exists = { code: 'PROCESS_GROUP_EXISTS' }
    await expect(initProcessGroup({ backend: 'recorded', env: ENV })).rejects.toMatchObject(exists)
    await first
    await expect(initProcessGroup({ backend: 'recorded', env: ENV })).rejects.toMatchObject(exists)
  })

  test('a failed attempt or departure leaves nothing behind', async () => {
    await expect(initProcessGroup({ backend: 'failing', env: ENV })).rejects.toThrow('no peers')
    const stuck = await initProcessGroup({ backend: 'stuck', env: ENV })
    await expect(stuck.destroy()).rejects.toThrow('stuck')
    await initProcessGroup({ backend: 'recorded', env: ENV })
  })

  test('collectives that nobody registered are named, with the import that would', async () => {
    await expect(initProcessGroup({ backend: 'remote', env: ENV })).rejects.toMatchObject({
      code: 'COLLECTIVES_NOT_REGISTERED',
      remedy: expect.stringContaining("import '@rankwise/collectives-remote'"),
    })
    await expect(initProcessGroup({ env: ENV })).rejects.toMatchObject({
      remedy: expect.stringContaining("import '@rankwise/collectives-local'"),
    })
  })

  test.each([0, -1, 1.5, Number.NaN, Number.POSITIVE_INFINITY, 2 ** 31])(
    'timeoutMs %d is refused',
    async (timeoutMs) => {
      const refused = initProcessGroup({ backend: 'recorded', env: ENV, timeoutMs })
      await expect(refused).rejects.toMatchObject({ code: 'PROCESS_GROUP_TIMEOUT' })
    },
  )

  test('a bad environment is refused before anything is joined', async () => {
    const refused = initProcessGroup({ backend: 'failing', env: { ...ENV, RANK: '9' } })
    await expect(refused).rejects.toMatchObject({ code: 'RENDEZVOUS_ENV' })
  })
})

test('one name cannot be registered for two factories', () => {
  expect(() => registerCollectives('recorded', factory)).not.toThrow()
  expect(() => registerCollectives('recorded', async () => factory as never)).toThrow(
    expect.objectContaining({ code: 'COLLECTIVES_NAME_TAKEN' }),
  )
})

import { availableParallelism } from 'node:os'
import { RankwiseError } from '@rankwise/core'
import { describe, expect, it } from 'vitest'
import { ort } from '../src/index.ts'
import { defaultThreads } from '../src/threads.ts'

const cores = availableParallelism()
const launch = (localWorldSize: number) => ({
  RANK: '0',
  WORLD_SIZE: String(localWorldSize),
  LOCAL_RANK: '0',
  LOCAL_WORLD_SIZE: String(localWorldSize),
  MASTER_ADDR: '127.0.0.1',
  MASTER_PORT: '29500',
})

describe('threads', () => {
  it('are all cores when there is one rank', async () => {
    expect(defaultThreads({})).toBe(cores)
    expect((await ort({ device: 'cpu' })).threads).toBe(defaultThreads())
  })

  it('are shared out to the ranks on this machine', () => {
    expect(defaultThreads(launch(1))).toBe(cores)
    expect(defaultThreads(launch(2))).toBe(Math.max(1, Math.floor(cores / 2)))
    expect(defaultThreads(launch(cores))).toBe(1)
    expect(defaultThreads(launch(10 * cores))).toBe(1)
  })

  it('can be given', async () => {
    expect((await ort({ device: 'cpu', threads: 3 })).threads).toBe(3)
  })

  it.each([0, -1, 1.5, Number.NaN])('are not %s', async (threads) => {
    await expect(ort({ device: 'cpu', threads })).rejects.toMatchObject({ code: 'BACKEND_THREADS' })
  })

  it('refuses an environment that contradicts itself', () => {
    expect(() => defaultThreads({ LOCAL_WORLD_SIZE: 'two' })).toThrow(RankwiseError)
  })
})

describe('device', () => {
  it.each(['cuda:0', 'gpu', '', undefined])('is not %s', async (device) => {
    await expect(ort({ device: device as 'cpu' })).rejects.toMatchObject({ code: 'BACKEND_DEVICE', actual: { device } })
  })
})

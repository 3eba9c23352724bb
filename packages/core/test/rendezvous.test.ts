import { describe, expect, test } from 'vitest'
import { DEFAULT_TIMEOUT_MS, type Environment, rendezvousFromEnv } from '../src/rendezvous.ts'

const TORCHRUN = {
  RANK: '3',
  LOCAL_RANK: '1',
  WORLD_SIZE: '4',
  LOCAL_WORLD_SIZE: '2',
  MASTER_ADDR: 'node-0.cluster',
  MASTER_PORT: '29500',
}

describe('rendezvousFromEnv', () => {
  test('nothing set: rank 0 of 1', () => {
    expect(rendezvousFromEnv({ PATH: '/bin' })).toMatchObject({
      rank: 0,
      localRank: 0,
      worldSize: 1,
      localWorldSize: 1,
      timeoutMs: DEFAULT_TIMEOUT_MS,
    })
  })

  test("torchrun's variables", () => {
    expect(rendezvousFromEnv({ ...TORCHRUN, RANKWISE_TIMEOUT_MS: '5000', RANKWISE_TOKEN: 'secret' })).toEqual({
      rank: 3,
      localRank: 1,
      worldSize: 4,
      localWorldSize: 2,
      masterAddr: 'node-0.cluster',
      masterPort: 29500,
      timeoutMs: 5000,
      token: 'secret',
    })
  })

  test('without the local variables all ranks are on this machine', () => {
    const { LOCAL_RANK, LOCAL_WORLD_SIZE, ...env } = TORCHRUN
    expect(rendezvousFromEnv(env)).toMatchObject({ localRank: 3, localWorldSize: 4 })
  })

  test('a timeout alone still means one rank', () => {
    expect(rendezvousFromEnv({ RANKWISE_TIMEOUT_MS: '5000' })).toMatchObject({ worldSize: 1, timeoutMs: 5000 })
  })

  test.each(Object.keys(TORCHRUN))('%s missing', (name) => expectRefused({ ...TORCHRUN, [name]: undefined }, name))

  test.each(Object.keys(TORCHRUN))('%s alone', (name) => {
    const value = TORCHRUN[name as keyof typeof TORCHRUN]
    expect(() => rendezvousFromEnv({ [name]: value })).toThrow(
      expect.objectContaining({ code: 'RENDEZVOUS_ENV', rule: expect.stringContaining(`when ${name} is set`) }),
    )
  })

  test.each([
    ['RANK', ''],
    ['RANK', '-1'],
    ['RANK', '1.0'],
    ['RANK', ' 1'],
    ['RANK', '1e0'],
    ['RANK', '0x1'],
    ['RANK', '4'],
    ['WORLD_SIZE', '0'],
    ['WORLD_SIZE', 'two'],
    ['WORLD_SIZE', '9007199254740993'],
    ['LOCAL_RANK', '2'],
    ['LOCAL_WORLD_SIZE', '0'],
    ['LOCAL_WORLD_SIZE', '5'],
    ['MASTER_ADDR', ''],
    ['MASTER_ADDR', 'two words'],
    ['MASTER_PORT', '0'],
    ['MASTER_PORT', '65536'],
    ['MASTER_PORT', 'http'],
    ['RANKWISE_TIMEOUT_MS', '0'],
    ['RANKWISE_TIMEOUT_MS', '5s'],
    ['RANKWISE_TIMEOUT_MS', '2147483648'],
  ])('%s=%o is refused', (name, value) => expectRefused({ ...TORCHRUN, [name]: value }, name, value))

  test('a local rank above the rank is refused', () => {
    expectRefused({ ...TORCHRUN, RANK: '0' }, 'LOCAL_RANK', '1')
  })
})

function expectRefused(env: Environment, name: string, value?: string): void {
  expect(() => rendezvousFromEnv(env)).toThrow(
    expect.objectContaining({
      code: 'RENDEZVOUS_ENV',
      where: `environment variable ${name}`,
      actual: { [name]: value === undefined ? 'unset' : JSON.stringify(value) },
      rule: expect.stringContaining(name),
    }),
  )
}

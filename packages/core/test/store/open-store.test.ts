import { readdirSync, readlinkSync } from 'node:fs'
import { setTimeout } from 'node:timers/promises'
import { afterEach, describe, expect, test } from 'vitest'
import type { EnvironmentRendezvous } from '../../src/rendezvous.ts'
import { openStore } from '../../src/store/open-store.ts'
import { PrefixStore } from '../../src/store/prefix-store.ts'
import { TcpStoreServer } from '../../src/store/tcp-store-server.ts'
import type { Store } from '../../src/store.ts'

const opened: AsyncDisposable[] = []
afterEach(async () => {
  for (const store of opened.splice(0).reverse()) await store[Symbol.asyncDispose]()
})

/** How many sockets this process has open; those that do not keep it alive are seen only here. */
function sockets(): number {
  const descriptors = readdirSync('/proc/self/fd').map((descriptor) => {
    try {
      return readlinkSync(`/proc/self/fd/${descriptor}`)
    } catch {
      return '' // the one that lists the directory
    }
  })
  return descriptors.filter((target) => target.startsWith('socket:')).length
}

const onLinux = process.platform === 'linux'

async function freePort(): Promise<number> {
  const server = await TcpStoreServer.listen('127.0.0.1', 0, { secret: { token: '', scope: '' } })
  const { port } = server
  await server.close(0)
  return port
}

function rendezvous(rank: number, masterPort: number, overrides: Partial<EnvironmentRendezvous> = {}) {
  return {
    rank,
    worldSize: 3,
    localRank: rank,
    localWorldSize: 3,
    masterAddr: '127.0.0.1',
    masterPort,
    timeoutMs: 5_000,
    token: 'secret of this launch',
    ...overrides,
  }
}

async function open(rendezvous: EnvironmentRendezvous): Promise<Store> {
  const store = await openStore(rendezvous)
  opened.push(store)
  return store
}

async function openAll(overrides: Partial<EnvironmentRendezvous> = {}): Promise<[Store, Store, Store]> {
  const port = await freePort()
  return Promise.all([
    open(rendezvous(0, port, overrides)),
    open(rendezvous(1, port, overrides)),
    open(rendezvous(2, port, overrides)),
  ])
}

const bytes = (text: string) => Buffer.from(text)

describe('a store that rank 0 holds', () => {
  test('all ranks see what any has set, before and after it was set', async () => {
    const stores = await openAll()
    for (const [rank, store] of stores.entries()) {
      const waiting = stores.map((other) => other.get(`key ${rank}`))
      await store.set(`key ${rank}`, bytes(`value ${rank}`))
      for (const value of await Promise.all(waiting)) expect(String(value)).toBe(`value ${rank}`)
      expect(String(await stores[0].get(`key ${rank}`))).toBe(`value ${rank}`)
    }
  })

  test('a value may be empty, and is overwritten', async () => {
    const [host, guest] = await openAll()
    await guest.set('k', bytes(''))
    expect((await host.get('k')).byteLength).toBe(0)
    await host.set('k', bytes('2'))
    expect(String(await guest.get('k'))).toBe('2')
  })

  test('each add gives another number', async () => {
    const stores = await openAll()
    const numbers = await Promise.all(Array.from({ length: 30 }, (_, i) => (stores[i % 3] as Store).add('n', 1)))
    expect(numbers.sort((a, b) => a - b)).toEqual(Array.from({ length: 30 }, (_, i) => i + 1))
    expect(await stores[1].add('n', -30)).toBe(0)
  })

  test('a rank that waits can do something else meanwhile', async () => {
    const [, guest] = await openAll()
    const waiting = ['a', 'b', 'c'].map((key) => guest.get(key))
    for (const key of ['c', 'b', 'a']) await guest.set(key, bytes(key))
    expect((await Promise.all(waiting)).map(String)).toEqual(['a', 'b', 'c'])
  })

  test('what was set first is overwritten by what was set second', async () => {
    const [host, guest] = await openAll()
    for (let i = 0; i < 50; i++) {
      const busy = guest.get(`after ${i}`)
      await guest.set('k', bytes('first'))
      await guest.set('k', bytes(`second ${i}`))
      expect(String(await host.get('k'))).toBe(`second ${i}`)
      await guest.set(`after ${i}`, bytes(''))
      await busy
    }
  })

  test.each([0, 1])('rank %i: a value that does not come is named', async (rank) => {
    const store = (await openAll({ timeoutMs: 300 }))[rank] as Store
    await expect(store.get('never')).rejects.toMatchObject({ code: 'RENDEZVOUS_TIMEOUT', where: 'key never' })
    await store.set('k', bytes('still works'))
  })

  test.each([0, 1])('rank %i: a wait can be aborted, and the store goes on', async (rank) => {
    const store = (await openAll())[rank] as Store
    const controller = new AbortController()
    const waiting = store.get('k', { signal: controller.signal })
    const cause = new Error('enough')
    controller.abort(cause)
    await expect(waiting).rejects.toMatchObject({ code: 'ABORTED', cause })
    await expect(store.get('k', { signal: controller.signal })).rejects.toMatchObject({ code: 'ABORTED' })
    await store.set('k', bytes('v'))
    expect(String(await store.get('k'))).toBe('v')
  })

  test.each([0, 1])('rank %i: nothing works after close', async (rank) => {
    const store = (await openAll())[rank] as Store
    const waiting = store.get('k')
    void store.close()
    await expect(waiting).rejects.toMatchObject({ code: 'STORE_CLOSED' })
    await expect(store.get('k')).rejects.toMatchObject({ code: 'STORE_CLOSED' })
    await expect(store.set('k', bytes(''))).rejects.toMatchObject({ code: 'STORE_CLOSED' })
    await expect(store.add('k', 1)).rejects.toMatchObject({ code: 'STORE_CLOSED' })
  })

  test('is lost with rank 0', async () => {
    const secret = { token: 'secret of this launch', scope: ' 0' }
    const server = await TcpStoreServer.listen('127.0.0.1', 0, { secret })
    const guest = await open(rendezvous(1, server.port))
    const waiting = guest.get('k')
    await setTimeout(50)
    await server.close(0)
    const lost = { code: 'RANK_LOST', actual: { ranks: [0] } }
    await expect(waiting).rejects.toMatchObject(lost)
    await expect(guest.set('k', bytes(''))).rejects.toMatchObject(lost)
  })

  test.runIf(onLinux)('leaves nothing open', async () => {
    const before = sockets()
    const stores = await openAll()
    expect(sockets()).toBeGreaterThan(before)
    const waits = stores.map((store) => store.get('k').catch(() => {}))
    await setTimeout(50)
    await Promise.all([...stores.map((store) => store.close()), ...waits])
    await expect.poll(sockets).toBeLessThanOrEqual(before)
  })
})

describe('looking for rank 0', () => {
  test('it may come last', async () => {
    const port = await freePort()
    const guest = open(rendezvous(1, port))
    await setTimeout(200)
    await open(rendezvous(0, port))
    await (await guest).set('k', bytes(''))
  })

  test.runIf(onLinux)('it does not come', async () => {
    const before = sockets()
    const port = await freePort()
    await expect(openStore(rendezvous(1, port, { timeoutMs: 200 }))).rejects.toMatchObject({
      code: 'RENDEZVOUS_TIMEOUT',
      where: `127.0.0.1:${port}`,
    })
    await expect.poll(sockets).toBeLessThanOrEqual(before)
  })

  test('can be aborted', async () => {
    const controller = new AbortController()
    const opening = openStore(rendezvous(1, await freePort()), { signal: controller.signal })
    await setTimeout(50)
    controller.abort()
    await expect(opening).rejects.toMatchObject({ code: 'ABORTED' })
  })

  test('it cannot listen there', async () => {
    await expect(openStore(rendezvous(0, 1_234, { masterAddr: '192.0.2.1' }))).rejects.toMatchObject({
      code: 'RENDEZVOUS_ADDRESS',
      where: '192.0.2.1:1234',
    })
  })

  test('a rank of the last attempt does not get in after a restart', async () => {
    const port = await freePort()
    await open(rendezvous(0, port, { restartCount: 1 }))
    const late = openStore(rendezvous(1, port, { restartCount: 0, timeoutMs: 300 }))
    await expect(late).rejects.toMatchObject({ code: 'RENDEZVOUS_TIMEOUT' })
    await open(rendezvous(2, port, { restartCount: 1 }))
  })

  test('two jobs that share their ports do not meet', async () => {
    const masterPort = await freePort()
    const job = (jobId: string) => ({ jobId, token: undefined, portCount: 4 })
    const [host, otherHost] = [
      await open(rendezvous(0, masterPort, job('a'))),
      await open(rendezvous(0, masterPort, job('b'))),
    ]
    const [guest, otherGuest] = await Promise.all([
      open(rendezvous(1, masterPort, job('a'))),
      open(rendezvous(1, masterPort, job('b'))),
    ])
    await Promise.all([host.set('job', bytes('a')), otherHost.set('job', bytes('b'))])
    expect(String(await guest.get('job'))).toBe('a')
    expect(String(await otherGuest.get('job'))).toBe('b')
  })
})

test.runIf(onLinux)('a rank that is alone needs no network', async () => {
  const before = sockets()
  const store = await open(rendezvous(0, 0, { worldSize: 1 }))
  await store.set('k', bytes('v'))
  expect(String(await store.get('k'))).toBe('v')
  expect(sockets()).toBeLessThanOrEqual(before)
})

describe('the store of an agent', () => {
  test('all ranks are clients; groups, restarts and runs have keys of their own', async () => {
    const agent = await TcpStoreServer.listen('127.0.0.1', 0, { secret: { token: '', scope: '' } })
    opened.push({ [Symbol.asyncDispose]: () => agent.close(0) })
    const group = (overrides: Partial<EnvironmentRendezvous> = {}) =>
      open(rendezvous(0, agent.port, { agentRunId: 'run', token: undefined, ...overrides }))
    const stores = [
      await group(),
      await group(),
      await group({ restartCount: 1 }),
      await group({ agentRunId: 'other' }),
      await group({ token: 'secret' }),
      await group({ worldSize: 2 }),
    ]
    expect(await Promise.all(stores.map((store) => store.add('n', 1)))).toEqual([1, 1, 1, 1, 1, 1])
    expect(agent.values.keys().every((key) => key.startsWith('/rankwise/'))).toBe(true)
    expect(new Set(agent.values.keys()).size).toBe(6)
  })

  test('is lost with the agent', async () => {
    const agent = await TcpStoreServer.listen('127.0.0.1', 0, { secret: { token: '', scope: '' } })
    const store = await open(rendezvous(0, agent.port, { agentRunId: 'lost' }))
    await agent.close(0)
    await expect(store.set('k', bytes(''))).rejects.toMatchObject({ code: 'RANK_LOST', actual: {} })
  })
})

test('a part of a store has its own keys', async () => {
  const [host, guest] = await openAll()
  const part = new PrefixStore('part', guest)
  await part.set('k', bytes('v'))
  expect(String(await host.get('part/k'))).toBe('v')
  expect(await part.add('n', 2)).toBe(2)
  expect(await host.add('part/n', 1)).toBe(3)
  expect(String(await part.get('k'))).toBe('v')
})

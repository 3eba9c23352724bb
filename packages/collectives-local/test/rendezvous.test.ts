import { once } from 'node:events'
import { createConnection, createServer, type Socket } from 'node:net'
import { setTimeout } from 'node:timers/promises'
import { openStore, PrefixStore } from '@rankwise/core'
import { afterAll, beforeAll, beforeEach, describe, expect, test } from 'vitest'
import { localCollectives } from '../src/index.ts'
import { BARRIER, freePort, Ranks, type Reply, rendezvous } from './ranks.ts'

let ranks: Ranks
let port: number
beforeAll(() => {
  ranks = new Ranks(2)
})
afterAll(() => ranks[Symbol.asyncDispose]())
beforeEach(async () => {
  await ranks.ready()
  port = await freePort()
})

type Overrides = Parameters<typeof rendezvous>[3]

function init(rank: number, overrides: Overrides = {}, worldSize = 2): Promise<Reply> {
  const token = 'secret of this launch'
  return ranks.ask(rank, {
    do: 'init',
    rendezvous: rendezvous(rank, worldSize, port, { token, ...overrides }),
    options: {},
  })
}

async function expectWorkingGroup(replies: readonly Promise<Reply>[]): Promise<void> {
  expect((await Promise.all(replies)).flatMap(({ error }) => error ?? [])).toEqual([])
  await ranks.all(() => ({ do: 'run', call: BARRIER }))
}

async function connect(): Promise<Socket> {
  for (;;) {
    const socket = createConnection(port, '127.0.0.1')
    try {
      await once(socket, 'connect')
      return socket.on('error', () => {}).resume()
    } catch {
      await setTimeout(20)
    }
  }
}

/** Resolves when the connection is gone, in whatever way. */
function closed(socket: Socket): Promise<unknown> {
  return socket.destroyed ? Promise.resolve() : new Promise((resolve) => socket.on('close', resolve))
}

describe('a stranger on the port changes nothing', () => {
  const validate = Buffer.from('00cef7853c', 'hex')
  const setKey = Buffer.from('01050000000000000068656c6c6f0100000000000000ff', 'hex')
  const setLongValue = Buffer.from('01010000000000000061000000ffffffffff', 'hex')

  test.each<[string, string | Buffer]>([
    ['that sends garbage', '\u0000\u0001GET / HTTP/1.1\r\n\r\n'],
    ['that speaks HTTP', 'GET / HTTP/1.1\r\n\r\n'],
    ['that is a client of torch without token', Buffer.concat([validate, setKey])],
    ['that announces a huge value', Buffer.concat([validate, setLongValue])],
    ['that never ends', Buffer.concat([validate, Buffer.alloc(100_000, 1)])],
  ])('%s', async (_, text) => {
    const host = init(0)
    const stranger = await connect()
    stranger.write(text)
    await closed(stranger)
    await expectWorkingGroup([host, init(1)])
  })

  test('that is slow', async () => {
    const host = init(0)
    const stranger = await connect()
    stranger.write(validate.subarray(0, 3))
    await expectWorkingGroup([host, init(1)])
    await closed(stranger)
  })

  test('that comes before rank 0 and answers the others', async () => {
    const impostor = createServer((socket) =>
      socket
        .on('error', () => {})
        .resume()
        .end('220 welcome\r\n'),
    ).listen(port, '127.0.0.1')
    await once(impostor, 'listening')
    const guest = init(1)
    await once(impostor, 'connection')
    impostor.close()
    await once(impostor, 'close')
    await expectWorkingGroup([init(0), guest])
  })
})

test('rank 0 may come last', async () => {
  const guest = init(1)
  await setTimeout(300)
  await expectWorkingGroup([guest, init(0)])
})

test('a rank that does not come is named', async () => {
  const { error } = await init(0, { timeoutMs: 300 })
  expect(error?.code).toBe('RENDEZVOUS_TIMEOUT')
  expect(error?.message).toMatch('rank 1 did not join the group in time')
})

test('rank 0 that does not come is looked for until the timeout', async () => {
  const { error } = await init(1, { timeoutMs: 300 })
  expect(error?.code).toBe('RENDEZVOUS_TIMEOUT')
  expect(error?.message).toMatch(`127.0.0.1:${port}`)
})

test('a rank of another launch does not get in', async () => {
  const replies = await Promise.all([
    init(0, { timeoutMs: 500 }),
    init(1, { timeoutMs: 500, token: 'of another launch' }),
  ])
  expect(replies.map(({ error }) => error?.code)).toEqual(['RENDEZVOUS_TIMEOUT', 'RENDEZVOUS_TIMEOUT'])
})

test('another world size is refused at once, and rank 0 tells of it', async () => {
  const host = init(0, { timeoutMs: 1_000 })
  const guest = await init(1, {}, 3)
  expect(guest.error).toMatchObject({ code: 'RENDEZVOUS_REFUSED' })
  expect(guest.error?.message).toMatch('rank 1 has another world size than rank 0')
  expect((await host).error?.message).toMatch('rank 1 has another world size')
})

test('a second rank with the same number is refused, and the first is not disturbed', async () => {
  const host = init(0, { timeoutMs: 2_000 }, 3)
  const guests = await Promise.all([init(1, { timeoutMs: 10_000 }, 3), second()])
  // Whichever comes second is refused; the other waits until rank 0 gives up.
  const codes = guests.map(({ error }) => error?.code)
  expect(codes.filter((code) => code === 'RENDEZVOUS_REFUSED')).toHaveLength(1)
  expect(codes.filter((code) => code === 'RANK_LOST' || code === 'RENDEZVOUS_TIMEOUT')).toHaveLength(1)
  expect((await host).error).toMatchObject({ code: 'RENDEZVOUS_TIMEOUT' })

  async function second(): Promise<{ error?: { code: string } }> {
    const token = 'secret of this launch'
    const joined = localCollectives(rendezvous(1, 3, port, { token, timeoutMs: 10_000 }))
    return joined.then(
      () => ({}),
      (error) => ({ error }),
    )
  }
})

test('a rank that dies before the group is complete is named at once', async () => {
  const host = init(0, {}, 3)
  const guest = init(1, {}, 3)
  await setTimeout(300)
  ranks.kill(1, 'SIGKILL')
  const { error, ms } = await host
  expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [1] } })
  expect(ms).toBeLessThan(2_000)
  await guest
})

test('rank 0 that dies before the group is complete is named at once', async () => {
  const host = init(0, {}, 3)
  const guest = init(1, {}, 3)
  await setTimeout(300)
  ranks.kill(0, 'SIGKILL')
  const { error, ms } = await guest
  expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [0] } })
  expect(ms).toBeLessThan(2_000)
  await host
})

test('groups follow each other at one address', async () => {
  for (let i = 0; i < 20; i++) {
    await ranks.ready()
    await expectWorkingGroup([init(0), init(1)])
  }
})

test('a rank that goes on to the next group does not take the last one for it', async () => {
  await using last = await openStore(rendezvous(0, 2, port))
  const guest = await openStore(rendezvous(1, 2, port))
  await last.set('which', Buffer.from('last'))
  expect(String(await guest.get('which'))).toBe('last')
  await guest.close()

  const next = openStore(rendezvous(1, 2, port))
  await setTimeout(300)
  await last.close()
  await using host = await openStore(rendezvous(0, 2, port))
  await host.set('which', Buffer.from('next'))
  await using joined = await next
  expect(String(await joined.get('which'))).toBe('next')
})

test('ranks can meet in a store that they have', async () => {
  const alone = { ...rendezvous(0, 1, port), worldSize: 1 }
  await using store = await openStore(alone)
  const options = [0, 1].map((rank) => ({ store: new PrefixStore(`machine ${rank}`, store) }))
  const group = await Promise.all([0, 1].map((rank) => localCollectives(rendezvous(rank, 2, port), options[0])))
  expect(group.map(({ rank }) => rank)).toEqual([0, 1])
  await Promise.all(group.map((collectives) => collectives.destroy()))
})

test('an address that is in use is named', async () => {
  const server = createServer().listen(port, '127.0.0.1')
  await once(server, 'listening')
  const { error } = await init(0)
  expect(error).toMatchObject({
    code: 'RENDEZVOUS_ADDRESS',
    where: `127.0.0.1:${port}`,
    actual: { reason: 'EADDRINUSE' },
  })
  server.close()
})

test('an address of another machine is named', async () => {
  expect((await init(0, { masterAddr: '192.0.2.1' })).error).toMatchObject({ code: 'RENDEZVOUS_ADDRESS' })
})

test('ranks of several machines are refused', async () => {
  expect((await init(0, { localWorldSize: 1 })).error).toMatchObject({ code: 'TRANSPORT_UNSUPPORTED' })
})

test('failed attempts hold nothing', async () => {
  const before = await ranks.all(() => ({ do: 'held' }))
  for (let i = 0; i < 3; i++) await Promise.all([init(0, { timeoutMs: 100, token: 'a' }), init(1, { timeoutMs: 100 })])
  await setTimeout(100)
  expect(await ranks.all(() => ({ do: 'held' }))).toEqual(before)
})

test.each([0, 64, 100, 2 ** 28 + 64])('slots of %i bytes are refused', async (slotBytes) => {
  await expect(localCollectives(rendezvous(0, 2, port), { slotBytes })).rejects.toMatchObject({ code: 'SLOT_BYTES' })
})

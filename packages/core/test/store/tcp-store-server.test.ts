import { setTimeout } from 'node:timers/promises'
import fc from 'fast-check'
import { afterEach, describe, expect, test } from 'vitest'
import { ClientConnection } from '../../src/store/client-connection.ts'
import { type StoreServerOptions, TcpStoreServer } from '../../src/store/tcp-store-server.ts'
import { Command, int64, key, uint8, value } from '../../src/store/wire.ts'
import { RawClient } from './raw-client.ts'
import { PING, PONG, RECORDED, VALIDATE } from './recorded.ts'

const OPEN = { token: '', scope: '' }
const SECRET = { token: 'secret of this launch', scope: '0' }
const signal = new AbortController().signal

const servers: TcpStoreServer[] = []
afterEach(() => Promise.all(servers.splice(0).map((server) => server.close(0))))

async function listen(options: StoreServerOptions = { secret: OPEN }): Promise<TcpStoreServer> {
  const server = await TcpStoreServer.listen('127.0.0.1', 0, options)
  servers.push(server)
  return server
}

function connect(port: number, secret = SECRET): Promise<ClientConnection> {
  return ClientConnection.open({ host: '127.0.0.1', port, secret, signal })
}

/** The server serves whoever belongs there, whatever strangers do. */
async function expectServes(server: TcpStoreServer): Promise<void> {
  const client = await connect(server.port, server.secret)
  await client.set('after', Buffer.from('all'))
  expect(String(await client.get('after'))).toBe('all')
  client.close()
}

describe("torch's protocol", () => {
  test('recorded conversation', async () => {
    const { port } = await listen()
    using client = await RawClient.connect(port)
    for (const { what, sent, answer } of RECORDED) {
      client.send(sent)
      expect(await client.receive(answer.length / 2), what).toBe(answer)
    }
  })

  test('in pieces of any size', async () => {
    const server = await listen()
    const bytes = Buffer.from(RECORDED.map(({ sent }) => sent).join(''), 'hex')
    const answers = RECORDED.map(({ answer }) => answer).join('')
    const sizes = fc.array(fc.integer({ min: 1, max: 60 }), { minLength: 1, maxLength: 40 })
    await fc.assert(
      fc.asyncProperty(sizes, async (lengths) => {
        for (const name of server.values.keys()) server.values.delete(name)
        using client = await RawClient.connect(server.port)
        client.socket.setNoDelay(true)
        for (let at = 0, i = 0; at < bytes.length; i++) {
          const length = lengths[i % lengths.length] as number
          client.send(bytes.subarray(at, at + length))
          at += length
          await setTimeout(0)
        }
        expect(await client.receive(answers.length / 2)).toBe(answers)
      }),
      { numRuns: 10 },
    )
  })

  test('list_keys', async () => {
    const { port } = await listen()
    using client = await RawClient.validated(port)
    client.send(Buffer.concat([uint8(Command.SET), key('/a'), value(Buffer.from('1')), uint8(Command.LIST_KEYS)]))
    expect(await client.receive(18)).toBe('010000000000000002000000000000002f61')
  })

  test('a value of several chunks', async () => {
    const { port } = await listen()
    const client = await connect(port, OPEN)
    const long = Buffer.alloc(3_000_000, 'abc')
    await client.set('long', long)
    expect(Buffer.compare(await client.get('long'), long)).toBe(0)
    client.close()
  })

  test('a wait is ended by set, append, add, compare_set, multi_set and queue_push', async () => {
    const server = await listen()
    const { port } = server
    using other = await RawClient.validated(port)
    const one = value(Buffer.from('1'))
    const commands = [
      [uint8(Command.SET), key('k'), one],
      [uint8(Command.APPEND), key('k'), one],
      [uint8(Command.ADD), key('k'), int64(1)],
      [uint8(Command.COMPARE_SET), key('k'), value(Buffer.alloc(0)), one],
      [uint8(Command.MULTI_SET), int64(1), key('k'), one],
      [uint8(Command.QUEUE_PUSH), key('k'), one],
    ]
    for (const command of commands) {
      using waiting = await RawClient.validated(port)
      waiting.send(Buffer.concat([uint8(Command.WAIT), int64(2), key('k'), key('k')]))
      expect(await waiting.receive(0)).toBe('')
      other.send(Buffer.concat(command))
      expect(await waiting.receive(1)).toBe('00')
      server.values.delete('k')
    }
  })

  test('a barrier ends when all have come', async () => {
    const { port } = await listen()
    using first = await RawClient.validated(port)
    using second = await RawClient.validated(port)
    const barrier = Buffer.concat([uint8(Command.BARRIER), key('b'), int64(2)])
    first.send(barrier)
    expect(await first.receive(0)).toBe('')
    second.send(barrier)
    expect([await first.receive(1), await second.receive(1)]).toEqual(['00', '00'])
  })

  test('a client that goes while it waits leaves nothing', async () => {
    const server = await listen()
    const waiting = await RawClient.validated(server.port)
    waiting.send(Buffer.concat([uint8(Command.WAIT), int64(1), key('k')]))
    await waiting.receive(0)
    waiting.socket.destroy()
    await setTimeout(50)
    server.values.set('k', Buffer.from('1'))
    await expectServes(server)
  })
})

describe('whoever breaks a rule is cut off, and nobody else notices', () => {
  const text = (bytes: string) => Buffer.from(bytes).toString('hex')
  const hex = (...parts: Buffer[]) => VALIDATE + Buffer.concat(parts).toString('hex')
  const huge = int64(2n ** 62n)

  test.each<[string, string]>([
    ['HTTP', text('GET / HTTP/1.1\r\nHost: here\r\n\r\n')],
    ['another number', '00cef7853d'],
    ['a command before VALIDATE', PING],
    ['an unknown command', hex(uint8(99))],
    ['a huge key', hex(uint8(Command.SET), huge)],
    ['a key over the limit', hex(uint8(Command.SET), int64(4097))],
    ['a value over the limit', hex(uint8(Command.SET), key('k'), int64(2 ** 24 + 1))],
    ['a negative length', hex(uint8(Command.SET), int64(-1))],
    ['many keys', hex(uint8(Command.WAIT), int64(4097))],
    ['huge counts', hex(uint8(Command.MULTI_SET), huge)],
    [
      'a sum with a text',
      hex(uint8(Command.SET), key('k'), value(Buffer.from('x')), uint8(Command.ADD), key('k'), int64(1)),
    ],
    ['a command during a wait', hex(uint8(Command.WAIT), int64(1), key('no'), uint8(Command.GET_NUM_KEYS))],
  ])('%s', async (_, sent) => {
    const server = await listen()
    using stranger = await RawClient.connect(server.port)
    stranger.send(sent)
    expect(await stranger.isCutOff()).toBe(true)
    await expectServes(server)
  })

  test('more than the store may hold', async () => {
    const server = await listen({ secret: OPEN, limits: { totalBytes: 1_000 } })
    using greedy = await RawClient.validated(server.port)
    for (let i = 0; i < 20; i++) {
      greedy.send(Buffer.concat([uint8(Command.SET), key(`k${i}`), value(Buffer.alloc(100))]))
    }
    expect(await greedy.isCutOff()).toBe(true)
    expect(server.values.byteLength).toBeLessThan(1_000)
    server.values.delete('k0')
    await expectServes(server)
  })

  test('one that never reads is slowed down', async () => {
    const server = await listen()
    server.values.set('k', Buffer.alloc(2 ** 20))
    using lazy = await RawClient.validated(server.port)
    lazy.socket.pause()
    const before = process.memoryUsage().arrayBuffers
    const get = Buffer.concat([uint8(Command.GET), key('k')])
    lazy.send(Buffer.concat(Array<Buffer>(200).fill(get)))
    await setTimeout(100)
    expect(process.memoryUsage().arrayBuffers - before).toBeLessThan(50 * 2 ** 20)
    await expectServes(server)
  })

  test('one that is slow to begin', async () => {
    const server = await listen({ secret: OPEN, limits: { helloMs: 100 } })
    using silent = await RawClient.connect(server.port)
    using slow = await RawClient.connect(server.port)
    slow.send('00ce')
    await expectServes(server)
    expect(await silent.isCutOff()).toBe(true)
    expect(await slow.isCutOff()).toBe(true)
  })

  test('too many connections', async () => {
    const server = await listen({ secret: OPEN, limits: { connections: 2 } })
    using one = await RawClient.validated(server.port)
    using two = await RawClient.validated(server.port)
    using three = await RawClient.validated(server.port)
    expect(await three.isCutOff()).toBe(true)
    expect([one, two].map(({ socket }) => socket.destroyed)).toEqual([false, false])
  })
})

describe('with a token', () => {
  test('ranks that know it get in', async () => {
    await expectServes(await listen({ secret: SECRET }))
  })

  test.each([
    ['another token', { ...SECRET, token: 'secret of this launcH' }],
    ['no token', { ...SECRET, token: '' }],
    ['another attempt', { ...SECRET, scope: '1' }],
  ])('%s does not get in', async (_, secret) => {
    const server = await listen({ secret: SECRET })
    await expect(connect(server.port, secret)).rejects.toThrow('does not know the token')
    await expectServes(server)
  })

  test.each<[string, Buffer[]]>([
    ['set', [uint8(Command.SET), key('/k'), value(Buffer.from('x'))]],
    ['get', [uint8(Command.GET), key('/k')]],
    ['list_keys', [uint8(Command.LIST_KEYS)]],
    ['num_keys', [uint8(Command.GET_NUM_KEYS)]],
    ['wait', [uint8(Command.WAIT), int64(1), key('/k')]],
    ['a challenge without nonce', [uint8(Command.GET), key('/rankwise/challenge')]],
    ['an answer without challenge', [uint8(Command.SET), key('/rankwise/answer'), value(Buffer.alloc(32))]],
    ['a short nonce', [uint8(Command.SET), key('/rankwise/hello'), value(Buffer.alloc(8))]],
    ['many pings', Array<Buffer>(20).fill(Buffer.from(PING, 'hex'))],
  ])('a client that has not proven it can do nothing: %s', async (_, command) => {
    const server = await listen({ secret: SECRET })
    server.values.set('/k', Buffer.from('mine'))
    using stranger = await RawClient.validated(server.port)
    stranger.send(Buffer.concat(command))
    expect(await stranger.isCutOff()).toBe(true)
    expect(server.values.get('/k')?.toString()).toBe('mine')
    await expectServes(server)
  })

  test('an answer that was overheard is worth nothing on another connection', async () => {
    const server = await listen({ secret: SECRET })
    const sent: Buffer[] = []
    const { createServer, createConnection } = await import('node:net')
    const tap = createServer((socket) => {
      const onward = createConnection(server.port, '127.0.0.1')
      socket.on('data', (chunk) => sent.push(chunk))
      socket.pipe(onward).pipe(socket)
    }).listen(0, '127.0.0.1')
    await new Promise((resolve) => tap.once('listening', resolve))
    const rank = await connect((tap.address() as { port: number }).port)
    rank.close()
    tap.close()

    using stranger = await RawClient.connect(server.port)
    stranger.send(Buffer.concat(sent))
    expect(await stranger.isCutOff()).toBe(true)
  })

  test('a flood of strangers does not keep ranks out', async () => {
    const server = await listen({ secret: SECRET, limits: { strangers: 8 } })
    const flood = await Promise.all(Array.from({ length: 50 }, () => RawClient.validated(server.port)))
    await expectServes(server)
    expect(flood.filter(({ socket }) => !socket.destroyed).length).toBeLessThanOrEqual(8)
    for (const stranger of flood) stranger.socket.destroy()
  })

  test('a stranger in the place of the store learns nothing and is not believed', async () => {
    const server = await listen({ secret: { token: 'of the stranger', scope: '0' } })
    await expect(connect(server.port)).rejects.toThrow('does not know the token')
  })
})

describe('close', () => {
  test('frees the port at once and lets clients read what was set last', async () => {
    const server = await listen()
    const client = await connect(server.port, OPEN)
    const last = client.get('last')
    await setTimeout(50)
    server.values.set('/last', Buffer.from('word'))
    const { port } = server
    const closing = server.close()
    const next = await TcpStoreServer.listen('127.0.0.1', port, { secret: OPEN })
    servers.push(next)
    expect(String(await last)).toBe('word')
    client.close()
    await closing
  })

  test('does not wait for strangers, nor for ever for clients', async () => {
    const server = await listen({ secret: SECRET })
    using stranger = await RawClient.validated(server.port)
    await server.close()
    expect(await stranger.isCutOff()).toBe(true)

    const other = await listen()
    using client = await RawClient.validated(other.port)
    client.send(PING)
    expect(await client.receive(4)).toBe(PONG)
    await other.close(50)
    expect(await client.isCutOff()).toBe(true)
  })
})

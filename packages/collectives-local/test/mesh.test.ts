import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'
import { setTimeout } from 'node:timers/promises'
import { describe, expect, test } from 'vitest'
import type { Message } from '../src/connection.ts'
import { Mesh, type PeerAddress } from '../src/mesh.ts'

const LOOPBACK = '127.0.0.1'

async function listen(worldSize: number, tokens: readonly string[] = []): Promise<[Mesh[], PeerAddress[]]> {
  const meshes = await Promise.all(
    Array.from({ length: worldSize }, (_, rank) => {
      return Mesh.listen(LOOPBACK, { rank, token: tokens[rank] ?? 'secret', data: true })
    }),
  )
  return [meshes, meshes.map(({ place }) => place)]
}

function record(mesh: Mesh): { messages: [number, Message][]; lost: [number, string][] } {
  const heard = { messages: [] as [number, Message][], lost: [] as [number, string][] }
  mesh.listen({
    onMessage: (rank, message) => heard.messages.push([rank, message]),
    onLost: (rank, why) => heard.lost.push([rank, why]),
  })
  return heard
}

/** Whether it was ended or reset makes no difference. */
function closed(socket: Socket): Promise<void> {
  return new Promise((resolve) =>
    socket
      .on('error', () => {})
      .on('close', () => resolve())
      .resume(),
  )
}

/** What a rank says first, with a nonce: MAGIC, rank, channel. */
function greeting(rank: number): Buffer {
  const bytes = Buffer.alloc(12 + 32)
  bytes.writeUInt32LE(0x52_57_50_31, 0)
  bytes.writeUInt32LE(rank, 4)
  return bytes
}

const closeAll = (meshes: readonly Mesh[]) => {
  for (const mesh of meshes) {
    void mesh.close()
    for (const socket of mesh.data.values()) socket.destroy()
  }
}

describe('Mesh', () => {
  test('every rank hears every other one, and of its end', async () => {
    const [meshes, cards] = await listen(4)
    await Promise.all(meshes.map((mesh) => mesh.connect(cards, AbortSignal.timeout(5_000))))
    // What comes before anybody listens is kept.
    for (const [rank, mesh] of meshes.entries()) mesh.broadcast({ from: rank })
    await setTimeout(50)
    const heard = meshes.map(record)
    for (const [rank, { messages }] of heard.entries()) {
      const others = [0, 1, 2, 3].filter((other) => other !== rank)
      expect(messages.map(([from]) => from).sort()).toEqual(others)
      for (const [from, message] of messages) expect(message).toEqual({ from })
    }
    void meshes[2]?.close()
    await expect.poll(() => [0, 1, 3].map((rank) => heard[rank]?.lost)).toEqual(Array(3).fill([[2, 'closed']]))
    closeAll(meshes)
  })

  test.each([
    ['silence', ''],
    ['garbage', '\u0000\u0001\n\n{{{\n'],
    ['a web browser', 'GET / HTTP/1.1\r\n\r\n'],
    ['a long line', 'x'.repeat(100_000)],
    ['a rank that is too low', greeting(0)],
    ['a rank without proof', greeting(1)],
    ['a rank with a wrong proof', Buffer.concat([greeting(1), Buffer.alloc(32)])],
    ['a rank that does not exist', Buffer.concat([greeting(2 ** 31), Buffer.alloc(32)])],
  ])('strangers change nothing: %s', async (_, text) => {
    const [meshes, cards] = await listen(2)
    const strangers = Array.from({ length: 5 }, () => connect(cards[0]?.port as number, LOOPBACK))
    await Promise.all(strangers.map((socket) => once(socket, 'connect')))
    const ended = strangers.map(closed)
    for (const socket of strangers) socket.write(text)
    await Promise.all(meshes.map((mesh) => mesh.connect(cards, AbortSignal.timeout(5_000))))
    const heard = meshes.map(record)
    meshes[1]?.broadcast({ at: 1 })
    await expect.poll(() => heard[0]?.messages).toEqual([[1, { at: 1 }]])
    await Promise.all(ended)
    await expect(once(connect(cards[0]?.port as number, LOOPBACK), 'connect')).rejects.toThrow('ECONNREFUSED')
    closeAll(meshes)
  })

  test('what a rank says to join is worth nothing elsewhere', async () => {
    const [meshes, cards] = await listen(3)
    // Rank 2 knocks at what it takes for rank 1, which passes on what rank 0 says, as if it were rank 2.
    const answers: Buffer[] = []
    const trap = createServer((fooled) => {
      const relay = connect(cards[0]?.port as number, LOOPBACK)
      fooled.on('error', () => {}).on('data', (said: Buffer) => relay.write(said))
      relay.on('error', () => {}).on('data', (said: Buffer) => answers.push(said) && fooled.write(said))
    })
    await once(trap.listen(0, LOOPBACK), 'listening')
    const { port } = trap.address() as AddressInfo
    const trapped = cards.map((card, rank) => (rank === 1 ? { ...card, port } : { ...card, port: 1 }))
    await expect(meshes[2]?.connect(trapped, AbortSignal.timeout(5_000))).rejects.toMatchObject({ code: 'RANK_LOST' })
    await expect.poll(() => answers.length).toBeGreaterThan(0)
    for (const said of answers) expect(said.includes('secret')).toBe(false)
    const waiting = meshes[0]?.connect(cards, AbortSignal.timeout(300))
    await expect(waiting).rejects.toMatchObject({ code: 'RENDEZVOUS_TIMEOUT', actual: { ranks: [1, 2] } })
    trap.close()
    closeAll(meshes)
  })

  test('a rank that is none is not welcome to those that look for it', async () => {
    const [meshes, cards] = await listen(2)
    const impostor = createServer((socket) => socket.on('error', () => {}).write(Buffer.alloc(200)))
    await once(impostor.listen(0, LOOPBACK), 'listening')
    const { port } = impostor.address() as AddressInfo
    const misled = cards.map((card, rank) => (rank === 0 ? { ...card, port } : card))
    await expect(meshes[1]?.connect(misled, AbortSignal.timeout(5_000))).rejects.toMatchObject({ code: 'RANK_LOST' })
    impostor.close()
    closeAll(meshes)
  })

  test('more strangers than are kept do not keep a rank out', async () => {
    const [meshes, cards] = await listen(2)
    const { port } = cards[0] as PeerAddress
    const strangers = Array.from({ length: 100 }, () => connect(port, LOOPBACK).on('error', () => {}))
    await Promise.all(strangers.map((socket) => once(socket, 'connect')))
    // They come again and again while the ranks connect.
    const more = setInterval(() => strangers.push(connect(port, LOOPBACK).on('error', () => {})), 1)
    await Promise.all(meshes.map((mesh) => mesh.connect(cards, AbortSignal.timeout(5_000))))
    clearInterval(more)
    for (const socket of strangers) socket.destroy()
    closeAll(meshes)
  })

  test('ranks that do not come are named', async () => {
    const [meshes, cards] = await listen(3)
    const results = await Promise.allSettled(
      [0, 1].map((rank) => meshes[rank]?.connect(cards, AbortSignal.timeout(300))),
    )
    const errors = results.map((result) => (result as PromiseRejectedResult).reason)
    for (const error of errors) expect(error).toMatchObject({ code: 'RENDEZVOUS_TIMEOUT', actual: { ranks: [2] } })
    closeAll(meshes)
  })

  test('a rank with another token is refused', async () => {
    const [meshes, cards] = await listen(2, ['secret', 'guessed'])
    const [host, joiner] = await Promise.allSettled(meshes.map((mesh) => mesh.connect(cards, AbortSignal.timeout(500))))
    expect((host as PromiseRejectedResult).reason).toMatchObject({ code: 'RENDEZVOUS_TIMEOUT' })
    expect((joiner as PromiseRejectedResult).reason).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [0] } })
    closeAll(meshes)
  })

  test('a rank that gives up says why, even to those that have not found all others', async () => {
    const [meshes, cards] = await listen(3)
    const waiting = [0, 1].map((rank) => meshes[rank]?.connect(cards, AbortSignal.timeout(1_000)))
    await setTimeout(100)
    meshes[1]?.broadcast({ failure: { code: 'MPI_MACHINES', what: 'told', ranks: [1] } })
    void meshes[1]?.close()
    await expect(waiting[0]).rejects.toMatchObject({ code: 'MPI_MACHINES', actual: { ranks: [1] } })
    closeAll(meshes)
    await Promise.allSettled(waiting)
  })

  test('an address of another machine is an error of its own', async () => {
    const listening = Mesh.listen('192.0.2.1', { rank: 0, token: '' })
    await expect(listening).rejects.toMatchObject({ code: 'RENDEZVOUS_ADDRESS' })
  })
})

import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'
import { setTimeout } from 'node:timers/promises'
import { describe, expect, test } from 'vitest'
import type { Message } from '../src/connection.ts'
import type { Card } from '../src/machines.ts'
import { Mesh } from '../src/mesh.ts'

const LOOPBACK = '127.0.0.1'

async function listen(worldSize: number, tokens: readonly string[] = []): Promise<[Mesh[], Card[]]> {
  const meshes = await Promise.all(
    Array.from({ length: worldSize }, (_, rank) => Mesh.listen(LOOPBACK, { rank, token: tokens[rank] ?? 'secret' })),
  )
  const cards = meshes.map(({ address, port, nonce }, rank) => {
    return {
      rank,
      address,
      port,
      nonce,
      machine: 'a',
      host: 'a',
      pid: 1,
      localRank: 0,
      localWorldSize: 1,
      chunkBytes: 64,
    }
  })
  return [meshes, cards]
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

const closeAll = (meshes: readonly Mesh[]) => {
  for (const mesh of meshes) mesh.close()
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
    meshes[2]?.close()
    await expect.poll(() => [0, 1, 3].map((rank) => heard[rank]?.lost)).toEqual(Array(3).fill([[2, 'closed']]))
    closeAll(meshes)
  })

  test.each([
    ['silence', ''],
    ['garbage', '\u0000\u0001\n\n{{{\n'],
    ['a web browser', 'GET / HTTP/1.1\r\n\r\n'],
    ['a long line', 'x'.repeat(100_000)],
    ['a wrong proof', `{"hello":1,"proof":"${'0'.repeat(64)}"}\n`],
    ['no proof', '{"hello":1}\n'],
    ['a proof of another kind', '{"hello":1,"proof":{"length":64}}\n'],
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
    // Rank 1 knocks at what it takes for rank 0.
    const trap = createServer()
    await once(trap.listen(0, LOOPBACK), 'listening')
    const caught = once(trap, 'connection').then(async ([socket]) => String((await once(socket, 'data'))[0]))
    const trapped = cards.map((card, rank) =>
      rank === 0 ? { ...card, port: (trap.address() as AddressInfo).port } : card,
    )
    const fooled = meshes[1]?.connect(trapped, AbortSignal.timeout(300)).catch((error) => error.code)
    const hello = await caught
    expect(hello).toMatch(/^{"hello":1,/)
    expect(hello).not.toContain('secret')
    // Whoever hears it can say it neither to another rank, nor in the name of another one.
    const replay = connect(cards[2]?.port as number, LOOPBACK)
    replay.write(hello.replace('"hello":1', '"hello":3'))
    await closed(replay)
    expect(await fooled).toBe('RENDEZVOUS_TIMEOUT')
    trap.close()
    closeAll(meshes)
  })

  test('a rank that is none is not welcome to those that look for it', async () => {
    const [meshes, cards] = await listen(2)
    const impostor = createServer((socket) => socket.write(`{"welcome":"${'0'.repeat(64)}"}\n`))
    await once(impostor.listen(0, LOOPBACK), 'listening')
    const { port } = impostor.address() as AddressInfo
    const misled = cards.map((card, rank) => (rank === 0 ? { ...card, port } : card))
    await expect(meshes[1]?.connect(misled, AbortSignal.timeout(5_000))).rejects.toMatchObject({ code: 'RANK_LOST' })
    impostor.close()
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

  test('an address of another machine is an error of its own', async () => {
    const listening = Mesh.listen('192.0.2.1', { rank: 0, token: '' })
    await expect(listening).rejects.toMatchObject({ code: 'RENDEZVOUS_ADDRESS' })
  })
})

import { createConnection } from 'node:net'
import { networkInterfaces } from 'node:os'
import { openStore, PrefixStore, RankwiseError } from '@rankwise/core'
import { afterAll, afterEach, beforeAll, describe, expect, test } from 'vitest'
import { Arena, newNonce } from '../src/arena.ts'
import { localCollectives, type TransportChoice } from '../src/index.ts'
import { type Agreement, hostGroup, joinGroup } from '../src/join.ts'
import { Meeting } from '../src/meeting.ts'
import { Mesh } from '../src/mesh.ts'
import { loadNative } from '../src/native.ts'
import { LOOPBACK } from '../src/tcp-transport.ts'
import type { Ability } from '../src/transport-choice.ts'
import { BARRIER, freePort, RankProcess, Ranks, type Reply, rendezvous } from './ranks.ts'

const WITHOUT_KOFFI = new URL('workers/without-koffi.mjs', import.meta.url)

let ranks: Ranks
beforeAll(() => {
  ranks = new Ranks(2)
})
afterAll(() => ranks[Symbol.asyncDispose]())

async function init(choices: readonly (TransportChoice | undefined)[]): Promise<Reply[]> {
  await ranks.ready()
  const port = await freePort()
  return ranks.settle((rank) => {
    const transport = choices[rank]
    return {
      do: 'init',
      rendezvous: rendezvous(rank, 2, port, { timeoutMs: 20_000 }),
      options: transport === undefined ? {} : { transport },
    }
  })
}

/** What both ranks say that they use, after they have used it. */
async function used(choices: readonly (TransportChoice | undefined)[]): Promise<unknown[]> {
  expect((await init(choices)).flatMap(({ error }) => error ?? [])).toEqual([])
  await ranks.all(() => ({ do: 'run', call: BARRIER }))
  return ranks.all(() => ({ do: 'transport' }))
}

const codes = (replies: readonly Reply[]) => replies.map(({ error }) => error?.code)

describe('ranks that can share memory', () => {
  test.each<[string, readonly (TransportChoice | undefined)[], string, string]>([
    ['without a choice', [undefined, undefined], 'shm', 'every rank can share memory'],
    ['auto', ['auto', 'auto'], 'shm', 'every rank can share memory'],
    ['shm', ['shm', 'shm'], 'shm', "transport 'shm' was asked for"],
    ['tcp', ['tcp', 'tcp'], 'tcp', "transport 'tcp' was asked for"],
    ['tcp on one rank, and auto', ['auto', 'tcp'], 'tcp', "transport 'tcp' was asked for"],
    ['tcp on rank 0, and auto', ['tcp', undefined], 'tcp', "transport 'tcp' was asked for"],
  ])('%s', async (_, choices, transport, reason) => {
    expect(await used(choices)).toEqual(Array(2).fill([transport, reason]))
  })

  test('that ask for different transports are refused', async () => {
    const replies = await init(['shm', 'tcp'])
    expect(codes(replies)).toEqual(['RENDEZVOUS_REFUSED', 'RENDEZVOUS_REFUSED'])
    expect(replies[1]?.error?.message).toMatch('the ranks ask for different transports')
  })

  test('a rank that gives up while it joins is ABORTED, and named by the other', async () => {
    await ranks.ready()
    const port = await freePort()
    const waiting = [0, 1].map((rank) => {
      return ranks.ask(rank, { do: 'init', rendezvous: rendezvous(rank, 3, port), options: { transport: 'tcp' } })
    })
    await using store = await openStore(rendezvous(2, 3, port))
    await store.get('collectives-local/hello/1')
    await ranks.ask(1, { do: 'abortInit' })
    const [other, own] = await Promise.all(waiting)
    expect(own?.error?.code).toBe('ABORTED')
    expect(other?.error).toMatchObject({ code: 'RANK_LOST' })
    expect(other?.error?.message).toMatch('rank 1 aborted the rendezvous')
  })
})

describe.each([0, 1])('rank %i has no koffi', (lame) => {
  let healthy: RankProcess
  beforeAll(async () => {
    healthy = ranks.processes[lame] as RankProcess
    ranks.processes[lame] = new RankProcess(WITHOUT_KOFFI)
  })
  afterAll(async () => {
    ranks.kill(lame, 'SIGKILL')
    await ranks.processes[lame]?.exited
    ranks.processes[lame] = healthy
  })

  test('auto moves all ranks to tcp, and says why', async () => {
    const places = (await used(['auto', 'auto'])) as [string, string][]
    for (const [transport, reason] of places) {
      expect(transport).toBe('tcp')
      expect(reason).toMatch(`rank ${lame} cannot share memory: koffi, which calls the system, does not load`)
    }
  })

  test('shm on any rank is refused on all', async () => {
    for (const choices of [
      ['shm', 'shm'],
      ['auto', 'shm'],
      ['shm', 'auto'],
    ] as const) {
      const replies = await init(choices)
      expect(codes(replies)).toEqual(['TRANSPORT_UNSUPPORTED', 'TRANSPORT_UNSUPPORTED'])
      expect(replies[0]?.error?.message).toMatch(`rank ${lame} cannot share memory`)
    }
  })

  test('tcp needs none', async () => {
    expect(await used(['tcp', 'tcp'])).toEqual(Array(2).fill(['tcp', "transport 'tcp' was asked for"]))
  })
})

describe('ranks that cannot share one arena', () => {
  const made: Arena[] = []
  afterEach(() => {
    // Only those that the ranks have not destroyed themselves hold memory still.
    expect(made.map(({ bytes }) => bytes.length)).toEqual(made.map(() => 0))
    made.length = 0
  })

  /** Two ranks in one process, one of which fails to make or open the arena. */
  async function agree(choice: TransportChoice, failing: 0 | 1): Promise<PromiseSettledResult<Agreement>[]> {
    const native = await loadNative()
    await using store = await openStore({ ...rendezvous(0, 1, 1), worldSize: 1 })
    const [host, guest] = [0, 1].map(() => new Meeting(new PrefixStore('one', store), 5_000)) as [Meeting, Meeting]
    const ability: Ability = { choice, obstacle: undefined }
    const nonce = newNonce()
    const refuse = (): never => {
      throw new RankwiseError('SHARED_MEMORY', 'there is not enough', { actual: { bytes: 5 } })
    }
    const create = () => {
      const arena = Arena.create(native, 2, 4096, nonce)
      made.push(arena)
      return { arena, location: arena.location(nonce) }
    }
    const results = await Promise.allSettled([
      hostGroup(host, rendezvous(0, 2, 1), {
        ability,
        create: failing === 0 ? refuse : create,
        secret: 'a',
        slotBytes: 4096,
      }),
      joinGroup(guest, rendezvous(1, 2, 1), { ability, open: refuse }),
    ])
    for (const meeting of [host, guest]) meeting[Symbol.dispose]()
    return results
  }

  test.each([0, 1] as const)('rank %i fails: auto takes tcp', async (failing) => {
    for (const result of await agree('auto', failing)) {
      const value = result.status === 'fulfilled' ? result.value : result.reason
      const reason = `rank ${failing} cannot share memory: there is not enough (bytes 5)`
      expect(value).toMatchObject({ transport: 'tcp', reason, arena: undefined, secret: 'a' })
    }
  })

  test.each([0, 1] as const)('rank %i fails: shm fails on all', async (failing) => {
    for (const result of await agree('shm', failing)) {
      expect((result as PromiseRejectedResult).reason).toMatchObject({ code: 'SHARED_MEMORY' })
      expect((result as PromiseRejectedResult).reason.message).toMatch(`rank ${failing} cannot share memory`)
    }
  })
})

describe('the choice', () => {
  const alone = rendezvous(0, 1, 1)

  test('one rank alone needs none', async () => {
    await using group = await localCollectives(alone, { transport: 'tcp' })
    expect(group.transport).toBe('none')
  })

  test('another word is refused', async () => {
    const unknown = localCollectives(alone, { transport: 'udp' as 'tcp' })
    await expect(unknown).rejects.toMatchObject({ code: 'TRANSPORT_UNKNOWN' })
  })

  test('the environment is asked where no option is given', async () => {
    process.env.RANKWISE_TRANSPORT = 'pigeon'
    try {
      await expect(localCollectives(alone)).rejects.toMatchObject({ code: 'TRANSPORT_UNKNOWN' })
      await using group = await localCollectives(alone, { transport: 'tcp' })
      expect(group.rank).toBe(0)
    } finally {
      delete process.env.RANKWISE_TRANSPORT
    }
  })

  test('an option that does not exist is refused', async () => {
    const misspelt = localCollectives(alone, { transprot: 'tcp' } as object)
    await expect(misspelt).rejects.toMatchObject({ code: 'COLLECTIVES_OPTIONS', actual: { unknown: ['transprot'] } })
  })
})

test('nobody outside of this machine reaches the ranks', async () => {
  const mesh = await Mesh.listen(LOOPBACK, { rank: 0, token: '', data: true })
  expect(mesh.place.address).toBe('127.0.0.1')
  const outside = Object.values(networkInterfaces()).flatMap((addresses) => addresses ?? [])
  for (const { address } of outside.filter(({ internal, family }) => !internal && family === 'IPv4')) {
    const refused = new Promise((resolve) => createConnection(mesh.place.port, address).on('error', resolve))
    expect(await refused).toMatchObject({ code: 'ECONNREFUSED' })
  }
  await mesh.close()
})

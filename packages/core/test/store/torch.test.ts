import { describe, expect, test } from 'vitest'
import type { EnvironmentRendezvous } from '../../src/rendezvous.ts'
import { openStore } from '../../src/store/open-store.ts'
import { TcpStoreServer } from '../../src/store/tcp-store-server.ts'
import { findTorch, TorchStore } from './torch.ts'

// With the real torch, where a Python has it; recorded conversations are in tcp-store-server.test.ts.
const python = findTorch()

function agent(masterPort: number): EnvironmentRendezvous {
  return {
    rank: 1,
    worldSize: 2,
    localRank: 1,
    localWorldSize: 2,
    masterAddr: '127.0.0.1',
    masterPort,
    timeoutMs: 5_000,
    agentRunId: 'run',
  }
}

describe.runIf(python !== undefined)('with torch', { timeout: 60_000 }, () => {
  test.each(['libuv', 'legacy'] as const)("our client on torch's server (%s)", async (server) => {
    using torch = await TorchStore.start(python as string, 'master', server, 0)
    await using store = await openStore(agent(torch.port))
    await store.set('k', Buffer.from('value'))
    expect(String(await store.get('k'))).toBe('value')
    expect([await store.add('n', 3), await store.add('n', -5)]).toEqual([3, -2])

    const [key = ''] = /'(rankwise[^']*\/k)'/.exec(await torch.evaluate('store.list_keys()'))?.slice(1) ?? []
    expect(await torch.evaluate(`store.get('${key}')`)).toBe("b'value'")
    const waiting = store.get('later')
    await torch.evaluate(`store.set('${key.replace(/k$/, 'later')}', 'came')`)
    expect(String(await waiting)).toBe('came')

    const controller = new AbortController()
    const aborted = store.get('never', { signal: controller.signal })
    controller.abort()
    await expect(aborted).rejects.toMatchObject({ code: 'ABORTED' })
    expect(String(await store.get('k'))).toBe('value')
  })

  test("torch's client on our server", async () => {
    const server = await TcpStoreServer.listen('127.0.0.1', 0, { secret: { token: '', scope: '' } })
    using torch = await TorchStore.start(python as string, 'client', 'libuv', server.port)
    const results: readonly [string, string][] = [
      ["store.set('k', 'v')", 'None'],
      ["store.get('k')", "b'v'"],
      ["store.add('n', 5)", '5'],
      ["store.compare_set('q', '', 'v')", "b'v'"],
      ["store.check(['k', 'no'])", 'False'],
      ["store.wait(['no'], datetime.timedelta(milliseconds=100))", 'DistStoreError'],
      ["store.append('k', 'w')", 'None'],
      ["store.multi_get(['k', 'n'])", "[b'vw', b'5']"],
      ["store.queue_push('queue', 'e')", 'None'],
      ["store.queue_pop('queue')", "b'e'"],
      ["store.queue_pop('queue', False)", 'QueueEmptyError'],
      ['sorted(store.list_keys())', "['k', 'n', 'q']"],
      ['store.num_keys()', '3'],
      ["store.delete_key('k')", 'True'],
      ["store.barrier('all', 1, datetime.timedelta(seconds=1))", 'None'],
    ]
    for (const [expression, result] of results) expect(await torch.evaluate(expression), expression).toBe(result)
    await server.close(0)
  })

  test('a rank of torch can prove that it knows the token; without, it is cut off', async () => {
    const secret = { token: 'secret of this launch', scope: ' 0' }
    const server = await TcpStoreServer.listen('127.0.0.1', 0, { secret })
    using rank = await TorchStore.start(python as string, 'client', 'libuv', server.port)
    expect(await rank.evaluate("prove(store, 'secret of this launch', ' 0')")).toBe('True')
    expect(await rank.evaluate("store.add('n', 1)")).toBe('1')

    using stranger = await TorchStore.start(python as string, 'client', 'libuv', server.port)
    expect(await stranger.evaluate("store.add('n', 1)")).toBe('DistNetworkError')
    expect(server.values.get('/n')?.toString()).toBe('1')
    await server.close(0)
  })
})

import { Duplex } from 'node:stream'
import { setImmediate } from 'node:timers/promises'
import { LineReader } from '@rankwise/collectives-local/internals'
import fc from 'fast-check'
import { describe, expect, test } from 'vitest'
import { PmiServer } from '../src/pmi-server.ts'
import { formatPmiLine, PMI_LIMITS, parsePmiLine } from '../src/pmi-wire.ts'

const name = fc.stringMatching(/^[a-z_][a-zA-Z0-9_-]{0,20}$/).filter((text) => text !== 'cmd' && text !== '__proto__')
const value = fc.stringMatching(/^[!-~]{0,60}$/)

describe('lines of PMI-1', () => {
  test('what is written is read again', () => {
    const message = fc.record({ command: name, fields: fc.dictionary(name, value) })
    fc.assert(
      fc.property(message, ({ command, fields }) => {
        const line = formatPmiLine({ command, fields })
        expect(line.endsWith('\n')).toBe(true)
        const read = parsePmiLine(line.slice(0, -1))
        expect(read?.command).toBe(command)
        expect({ ...read?.fields }).toEqual({ ...fields })
      }),
    )
  })

  test('any text is read or refused, and what is read has a command', () => {
    fc.assert(
      fc.property(fc.oneof(fc.string(), fc.stringMatching(/^[cmd= a\0]*$/)), (line) => {
        const read = parsePmiLine(line)
        if (read !== undefined) expect(line).toContain(`cmd=${read.command}`)
      }),
    )
  })

  test.each([
    ['cmd=get_maxes ', { command: 'get_maxes', fields: {} }],
    [
      'cmd=put kvsname=kvs key=P0-0 value=a==b/c',
      { command: 'put', fields: { kvsname: 'kvs', key: 'P0-0', value: 'a==b/c' } },
    ],
  ])('as MPICH writes them: %s', (line, expected) => {
    const read = parsePmiLine(line)
    expect({ command: read?.command, fields: { ...read?.fields } }).toEqual(expected)
  })

  test.each(['', 'cmd', 'mcmd=spawn', 'hello', '=x cmd=get', 'GET / HTTP/1.1'])('refused: %j', (line) => {
    expect(parsePmiLine(line)).toBeUndefined()
  })
})

describe('LineReader', () => {
  test('finds the same lines however they are cut', () => {
    const lines = fc.array(fc.string({ unit: 'grapheme', maxLength: 20 }).map((line) => line.replaceAll('\n', ' ')))
    fc.assert(
      fc.property(lines, fc.array(fc.nat(200)), (expected, cuts) => {
        const bytes = Buffer.from(expected.map((line) => `${line}\n`).join(''))
        const places = [0, ...cuts.map((cut) => cut % (bytes.length + 1)), bytes.length].sort((a, b) => a - b)
        const reader = new LineReader(1_000)
        const found = places.slice(1).flatMap((end, i) => reader.push(bytes.subarray(places[i], end)) ?? ['TOO LONG'])
        expect(found).toEqual(expected)
      }),
    )
  })

  test.each(['123456\n', '123456', 'ok\n123456'])('refuses a line over the limit: %j', (text) => {
    expect(new LineReader(5).push(Buffer.from(text))).toBeUndefined()
    expect(new LineReader(6).push(Buffer.from(text))).toBeDefined()
  })
})

/** The side of MPICH: what it writes, and what it has been told. */
class Client {
  readonly failures: Error[] = []
  readonly #socket: Duplex
  #received = ''

  constructor(exchange: (round: number, puts: ReadonlyMap<string, string>) => Promise<ReadonlyMap<string, string>>) {
    this.#socket = new Duplex({
      read() {},
      write: (chunk, _, done) => {
        this.#received += chunk
        done()
      },
    })
    new PmiServer(this.#socket, { size: 3, exchange, onFailure: (error) => this.failures.push(error) })
  }

  async say(line: string): Promise<string> {
    this.#received = ''
    this.#socket.push(`${line}\n`)
    for (let i = 0; i < 5; i++) await setImmediate()
    return this.#received
  }
}

describe('PmiServer', () => {
  test('answers what MPICH asks on its way through MPI_Init', async () => {
    const rounds: [number, string[][]][] = []
    const client = new Client(async (round, puts) => {
      rounds.push([round, [...puts]])
      return new Map([...puts, ['P1', 'other']])
    })
    expect(await client.say('cmd=init pmi_version=1 pmi_subversion=1')).toBe(
      'cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n',
    )
    expect(await client.say('cmd=get_maxes')).toBe('cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024\n')
    expect(await client.say('cmd=get_appnum')).toBe('cmd=appnum appnum=0\n')
    expect(await client.say('cmd=get_my_kvsname')).toBe('cmd=my_kvsname kvsname=rankwise\n')
    expect(await client.say('cmd=get_universe_size')).toBe('cmd=universe_size size=3\n')
    const get = (key: string) => client.say(`cmd=get kvsname=rankwise key=${key}`)
    expect(await get('PMI_process_mapping')).toBe('cmd=get_result rc=0 msg=success value=(vector,(0,3,1))\n')
    expect(await client.say('cmd=put kvsname=rankwise key=P0 value=a=b')).toBe('cmd=put_result rc=0 msg=success\n')
    expect(await get('P1')).toMatch('rc=-1')
    expect(await client.say('cmd=barrier_in')).toBe('cmd=barrier_out\n')
    expect(await get('P0')).toMatch('value=a=b\n')
    expect(await get('P1')).toMatch('value=other\n')
    expect(await client.say('cmd=barrier_in')).toBe('cmd=barrier_out\n')
    expect(await client.say('cmd=finalize')).toBe('cmd=finalize_ack\n')
    expect(rounds).toEqual([
      [0, [['P0', 'a=b']]],
      [1, []],
    ])
    expect(client.failures).toEqual([])
  })

  test('does not answer a barrier before all have come', async () => {
    const client = new Client(() => new Promise(() => {}))
    expect(await client.say('cmd=barrier_in')).toBe('')
  })

  test('refuses what is longer than announced', async () => {
    const client = new Client(async () => new Map())
    const put = (key: string, text: string) => client.say(`cmd=put kvsname=rankwise key=${key} value=${text}`)
    expect(await put('k'.repeat(PMI_LIMITS.key), 'v'.repeat(PMI_LIMITS.value))).toMatch('rc=0')
    expect(await put('k'.repeat(PMI_LIMITS.key + 1), 'v')).toMatch('rc=-1')
    expect(await put('k', 'v'.repeat(PMI_LIMITS.value + 1))).toMatch('rc=-1')
  })

  test.each([
    ['cmd=abort exitcode=7', /MPI aborted with exit code 7/],
    ['cmd=lookup_name service=x', /'lookup_name' is not supported/],
    ['mcmd=spawn', /not a message/],
    [`cmd=put value=${'x'.repeat(5_000)}`, /too long/],
  ])('reports %.30s', async (line, message) => {
    const client = new Client(async () => new Map())
    expect(await client.say(line)).toBe('')
    expect(client.failures.map(String)).toEqual([expect.stringMatching(message)])
  })
})

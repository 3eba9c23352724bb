import type { Duplex } from 'node:stream'
import { LineReader } from '@rankwise/collectives-local/internals'
import { formatPmiLine, PMI_LIMITS, PMI_LINE_LIMIT, type PmiMessage, parsePmiLine } from './pmi-wire.ts'

/** What processes tell each other at a barrier: what each of them has put since the last one. */
export type PmiExchange = (round: number, puts: ReadonlyMap<string, string>) => Promise<ReadonlyMap<string, string>>

export interface PmiWorld {
  /** Number of processes that call MPI_Init together, each on a machine of its own. */
  readonly size: number
  readonly exchange: PmiExchange
  /** Called when the client breaks the protocol, aborts, or the exchange fails; MPI_Init may then never return. */
  readonly onFailure: (error: Error) => void
}

const NAME = 'rankwise'

/**
 * Speaks PMI-1, the protocol in which MPICH learns of its peers, with the MPI library of this very process. A barrier
 * makes what all have put known to all, so every `get` is answered from memory.
 */
export class PmiServer {
  readonly #socket: Duplex
  readonly #world: PmiWorld
  readonly #known: Map<string, string>
  #puts = new Map<string, string>()
  #round = 0

  /** @param socket the other end of what `PMI_FD` names */
  constructor(socket: Duplex, world: PmiWorld) {
    this.#socket = socket
    this.#world = world
    // One process on each machine. Where two "machines" are one, MPI must not look for shared memory between them.
    this.#known = new Map([['PMI_process_mapping', `(vector,(0,${world.size},1))`]])
    const reader = new LineReader(PMI_LINE_LIMIT)
    socket.on('error', world.onFailure)
    socket.on('data', (chunk: Buffer) => {
      const lines = reader.push(chunk)
      if (lines === undefined) world.onFailure(new Error('PMI: a line is too long'))
      else for (const line of lines) void this.#serve(line)
    })
  }

  async #serve(line: string): Promise<void> {
    try {
      const message = parsePmiLine(line)
      if (message === undefined) throw new Error(`PMI: not a message: ${JSON.stringify(line.slice(0, 100))}`)
      const answer = await this.#answer(message)
      if (answer !== undefined && this.#socket.writable) this.#socket.write(formatPmiLine(answer))
    } catch (error) {
      this.#world.onFailure(error as Error)
    }
  }

  async #answer({ command, fields }: PmiMessage): Promise<PmiMessage | undefined> {
    switch (command) {
      case 'init':
        return reply('response_to_init', { pmi_version: '1', pmi_subversion: '1', rc: '0' })
      case 'get_maxes':
        return reply('maxes', {
          kvsname_max: String(PMI_LIMITS.kvsname),
          keylen_max: String(PMI_LIMITS.key),
          vallen_max: String(PMI_LIMITS.value),
        })
      case 'get_appnum':
        return reply('appnum', { appnum: '0' })
      case 'get_my_kvsname':
        return reply('my_kvsname', { kvsname: NAME })
      case 'get_universe_size':
        return reply('universe_size', { size: String(this.#world.size) })
      case 'put':
        return this.#put(fields)
      case 'get':
        return this.#get(fields)
      case 'barrier_in':
        return this.#barrier()
      case 'finalize':
        return reply('finalize_ack', {})
      case 'abort':
        throw new Error(`MPI aborted${fields.exitcode === undefined ? '' : ` with exit code ${fields.exitcode}`}`)
      default:
        throw new Error(`PMI: '${command}' is not supported`)
    }
  }

  #put({ key = '', value = '' }: PmiMessage['fields']): PmiMessage {
    if (key === '' || key.length > PMI_LIMITS.key || value.length > PMI_LIMITS.value) {
      return reply('put_result', { rc: '-1', msg: 'invalid_length' })
    }
    this.#puts.set(key, value)
    return reply('put_result', { rc: '0', msg: 'success' })
  }

  #get({ key = '' }: PmiMessage['fields']): PmiMessage {
    const value = this.#known.get(key) ?? this.#puts.get(key)
    if (value === undefined) return reply('get_result', { rc: '-1', msg: 'key_not_found', value: 'unknown' })
    return reply('get_result', { rc: '0', msg: 'success', value })
  }

  async #barrier(): Promise<PmiMessage> {
    const puts = this.#puts
    this.#puts = new Map()
    const all = await this.#world.exchange(this.#round++, puts)
    for (const [key, value] of all) this.#known.set(key, value)
    return reply('barrier_out', {})
  }
}

function reply(command: string, fields: Readonly<Record<string, string>>): PmiMessage {
  return { command, fields }
}

import { readdirSync, readFileSync } from 'node:fs'
import { type Collectives, openStore, RankwiseError, type Store } from '@rankwise/core'
import { mpiCollectives } from '../../src/index.ts'
import { callOn } from '../call.ts'
import type { Command, Held, InitOptions, Reply, Report } from '../ranks.ts'

// A rank that does what the test tells it over IPC and reports every result and every error.

let collectives: Collectives | undefined
let controller = new AbortController()

function group(): Collectives {
  if (collectives === undefined) throw new Error('not in a group')
  return collectives
}

/** A store in which every rank finds on other machines those that the test puts there. */
function withMachines(store: Store, machines: readonly string[]): Store {
  return {
    set: (key, value) => store.set(key, value),
    add: (key, amount) => store.add(key, amount),
    close: () => store.close(),
    [Symbol.asyncDispose]: () => store.close(),
    get: async (key, options) => {
      const value = await store.get(key, options)
      const [, rank] = /^rank\/(\d+)$/.exec(key) ?? []
      if (rank === undefined) return value
      const card = JSON.parse(new TextDecoder().decode(value))
      return new TextEncoder().encode(JSON.stringify({ ...card, machine: machines[Number(rank)] }))
    },
  }
}

async function init({ rendezvous }: Command & { do: 'init' }, { machines, ...options }: InitOptions): Promise<void> {
  if (machines === undefined) {
    collectives = await mpiCollectives(rendezvous, options)
    return
  }
  const store = await openStore(rendezvous)
  try {
    collectives = await mpiCollectives(rendezvous, { ...options, store: withMachines(store, machines) })
  } finally {
    void store.close()
  }
}

/** What the process has open: file descriptors, mappings of shared memory, and processes. */
function held(): Held {
  const mappings = readFileSync('/proc/self/maps', 'utf8').split('\n')
  const children = readFileSync(`/proc/self/task/${process.pid}/children`, 'utf8').trim().split(' ')
  return {
    descriptors: readdirSync('/proc/self/fd').length,
    mappings: mappings.filter((line) => line.includes('memfd:rankwise')).length,
    children: children.filter((pid) => pid !== '' && commandOf(pid).includes('mpi-process-main')).length,
  }
}

function commandOf(pid: string): string {
  return readFileSync(`/proc/${pid}/cmdline`, 'utf8')
}

async function obey(command: Command): Promise<unknown> {
  switch (command.do) {
    case 'init':
      return init(command, command.options)
    case 'run':
      controller = new AbortController()
      return callOn(group(), command.call, controller.signal)
    case 'abortSignal':
      return controller.abort(new Error('the user pressed stop'))
    case 'abort':
      return group().abort(new Error(command.message))
    case 'setLibrary':
      if (command.path === undefined) delete process.env.RANKWISE_MPI_LIBRARY
      else process.env.RANKWISE_MPI_LIBRARY = command.path
      return undefined
    case 'held':
      return held()
    case 'destroy':
      await collectives?.destroy()
      return undefined
    case 'finish':
      // Without destroy: nothing may keep the process alive.
      process.disconnect()
      return undefined
  }
}

function report(error: unknown): Report {
  if (error instanceof RankwiseError) {
    const { code, message, actual, where } = error
    return { code, message, where, actual: JSON.parse(JSON.stringify(actual)) }
  }
  return { code: 'UNEXPECTED', message: error instanceof Error ? (error.stack ?? error.message) : String(error) }
}

process.on('message', async ({ id, ...command }: Command & { id: number }) => {
  const started = performance.now()
  let reply: Reply
  try {
    reply = { id, value: await obey(command as Command) }
  } catch (error) {
    reply = { id, error: report(error), ms: performance.now() - started }
  }
  if (process.connected) process.send?.(reply)
})

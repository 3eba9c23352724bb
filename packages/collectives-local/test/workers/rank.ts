import { readdirSync, readFileSync, readlinkSync } from 'node:fs'
import { RankwiseError, type Rendezvous, Tensor, viewAs } from '@rankwise/core'
import { type LocalGroup, localCollectives, type SharedTensor } from '../../src/index.ts'
import type { Call, Command, Held, Reply, Report } from '../ranks.ts'
import { randomCalls } from './random-calls.ts'
import { runCall } from './run-call.ts'

// A rank that does what the test tells it over IPC and reports every result and every error.

/** The group that this rank makes its calls in: the last one that it joined. */
let collectives: LocalGroup | undefined
/** Those that it was made from. */
let parents: LocalGroup[] = []
let shared: SharedTensor<'float32'> | undefined
let controller = new AbortController()
let joining = new AbortController()

function group(): LocalGroup {
  if (collectives === undefined) throw new Error('not in a group')
  return collectives
}

async function run(call: Call): Promise<Uint8Array[]> {
  const tensors = call.tensors.map(
    ({ dtype, shape, bytes }) => new Tensor(dtype, shape, viewAs(dtype, new Uint8Array(bytes))),
  )
  controller = new AbortController()
  return runCall(group(), call, tensors, controller.signal)
}

/** Makes one call after the other, of all sizes, until one fails. */
async function untilFailure(): Promise<void> {
  for (let i = 0; ; i++) {
    await group().allReduce([Tensor.zeros('float32', [4 ** (i % 10)])])
    if (i % 7 === 0) await group().barrier()
  }
}

/** What the process has open: file descriptors by target, and mappings of shared memory. */
function held(): Held {
  const descriptors = readdirSync('/proc/self/fd').flatMap((fd) => {
    try {
      return [readlinkSync(`/proc/self/fd/${fd}`)]
    } catch {
      return [] // the one that lists the directory
    }
  })
  const mappings = readFileSync('/proc/self/maps', 'utf8').split('\n')
  return {
    descriptors: descriptors.length,
    mappings: mappings.filter((line) => line.includes('memfd:rankwise')).length,
  }
}

function block(ms: number): void {
  const end = performance.now() + ms
  while (performance.now() < end) {
    // hold the event loop, as a synchronous native call does
  }
}

async function obey(command: Command): Promise<unknown> {
  switch (command.do) {
    case 'init':
      joining = new AbortController()
      collectives = await localCollectives(command.rendezvous as Rendezvous, {
        ...command.options,
        signal: joining.signal,
      })
      return undefined
    case 'abortInit':
      return joining.abort(new Error('the user pressed stop'))
    case 'run':
      return run(command.call)
    case 'runAll':
      return Promise.all(command.calls.map(run))
    case 'random':
      return randomCalls(group(), command.seed, command.count)
    case 'allocate':
      shared = await group().allocate('float32', [command.elements])
      return undefined
    case 'newGroup': {
      const made = await group().newGroup(command.ranks)
      if (made !== undefined) parents.push(group())
      collectives = made ?? collectives
      return [group().rank, group().worldSize]
    }
    case 'kernel':
      return group().kernel
    case 'transport':
      return [group().transport, group().transportReason]
    case 'dispose':
      return shared?.dispose()
    case 'reduceShared':
      shared?.data.fill(group().rank + 1)
      return group().allReduce([shared as Tensor])
    case 'readShared':
      return [shared?.data[0], shared?.data.at(-1)]
    case 'untilFailure':
      return untilFailure()
    case 'abortSignal':
      return controller.abort(new Error('the user pressed stop'))
    case 'abort':
      return group().abort(new Error(command.message))
    case 'block':
      return block(command.ms)
    case 'held':
      return held()
    case 'destroy':
      for (const joined of [collectives, ...parents]) await joined?.destroy()
      parents = []
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

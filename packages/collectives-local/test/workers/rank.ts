import { readdirSync, readFileSync, readlinkSync } from 'node:fs'
import { type Collectives, RankwiseError, type Rendezvous, Tensor, viewAs } from '@rankwise/core'
import { localCollectives } from '../../src/index.ts'
import type { Call, Command, Held, Reply, Report } from '../ranks.ts'

// A rank that does what the test tells it over IPC and reports every result and every error.

let collectives: Collectives | undefined
let controller = new AbortController()

function group(): Collectives {
  if (collectives === undefined) throw new Error('not in a group')
  return collectives
}

async function run(call: Call): Promise<Uint8Array[]> {
  const tensors = call.tensors.map(
    ({ dtype, shape, bytes }) => new Tensor(dtype, shape, viewAs(dtype, new Uint8Array(bytes))),
  )
  const [tensor] = tensors as [Tensor]
  controller = new AbortController()
  const options = { signal: controller.signal, ...(call.op ? { op: call.op } : {}) }
  if (call.kind === 'allGather') return [bytesOf(await group().allGather(tensor, options))]
  if (call.kind === 'reduceScatter') return [bytesOf(await group().reduceScatter(tensor, options))]
  if (call.kind === 'allReduce') await group().allReduce(tensors, options)
  if (call.kind === 'broadcast') await group().broadcast(tensor, { ...options, source: call.source ?? 0 })
  if (call.kind === 'barrier') await group().barrier(options)
  return tensors.map(bytesOf)
}

function bytesOf({ data }: Tensor): Uint8Array {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
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
      collectives = await localCollectives(command.rendezvous as Rendezvous, command.options)
      return undefined
    case 'run':
      return run(command.call)
    case 'runAll':
      return Promise.all(command.calls.map(run))
    case 'abortSignal':
      return controller.abort(new Error('the user pressed stop'))
    case 'abort':
      return group().abort(new Error(command.message))
    case 'block':
      return block(command.ms)
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

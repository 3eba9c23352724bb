import { readdirSync, readFileSync } from 'node:fs'
import { RankwiseError, Tensor, viewAs } from '@rankwise/core'
import { type DeviceBuffer, type NcclCollectives, ncclCollectives } from '../../src/index.ts'
import { IpcStore } from '../ipc-store.ts'
import { OnDevice } from '../on-device.ts'
import type { Call, Command, GroupOptions, Reply, Report } from '../ranks.ts'

// A rank that does what the test tells it over IPC and reports every result and every error.

const store = new IpcStore()
let collectives: NcclCollectives | undefined
let controller = new AbortController()

function group(): NcclCollectives {
  if (collectives === undefined) throw new Error('not in a group')
  return collectives
}

async function init(
  rank: number,
  worldSize: number,
  { timeoutMs = 20_000, masterPort, ...options }: GroupOptions,
  env: Record<string, string>,
): Promise<void> {
  for (const name of Object.keys(process.env)) if (/^(STUB|NCCL)_/.test(name)) delete process.env[name]
  Object.assign(process.env, env)
  store.broken = undefined
  controller = new AbortController()
  const self = { rank, worldSize, localRank: rank, localWorldSize: worldSize }
  const rendezvous = { ...self, masterAddr: '127.0.0.1', masterPort: masterPort ?? 1, timeoutMs }
  const place = masterPort === undefined ? { store } : {}
  collectives = await ncclCollectives(rendezvous, { ...options, ...place, signal: controller.signal })
}

async function run(call: Call): Promise<Uint8Array[]> {
  return call.onDevice ? runOnDevice(call, await OnDevice.open()) : runOnHost(call)
}

/** Makes all calls at once, in order: what takes time before a call is done first. */
async function runAll(calls: readonly Call[]): Promise<Uint8Array[][]> {
  const devices = await Promise.all(calls.map(({ onDevice }) => (onDevice ? OnDevice.open() : undefined)))
  return Promise.all(
    calls.map((call, i) => {
      const device = devices[i]
      return device === undefined ? runOnHost(call) : runOnDevice(call, device)
    }),
  )
}

async function runOnHost(call: Call): Promise<Uint8Array[]> {
  controller = new AbortController()
  const options = { signal: controller.signal, ...(call.op ? { op: call.op } : {}) }
  const tensors = call.tensors.map(
    ({ dtype, shape, bytes }) => new Tensor(dtype, shape, viewAs(dtype, new Uint8Array(bytes))),
  )
  const [tensor] = tensors as [Tensor]
  if (call.kind === 'allGather') return [bytesOf(await group().allGather(tensor, options))]
  if (call.kind === 'reduceScatter') return [bytesOf(await group().reduceScatter(tensor, options))]
  if (call.kind === 'allReduce') await group().allReduce(tensors, options)
  if (call.kind === 'broadcast') await group().broadcast(tensor, { ...options, source: call.source ?? 0 })
  if (call.kind === 'barrier') await group().barrier(options)
  return tensors.map(bytesOf)
}

async function runOnDevice(call: Call, device: OnDevice): Promise<Uint8Array[]> {
  controller = new AbortController()
  const options = { signal: controller.signal, ...(call.op ? { op: call.op } : {}) }
  try {
    const buffers = call.tensors.map((tensor) => device.put(tensor))
    const [input] = buffers as [DeviceBuffer]
    const rows = { allGather: group().worldSize, reduceScatter: 1 / group().worldSize } as Record<string, number>
    const factor = rows[call.kind]
    if (factor === undefined) {
      if (call.kind === 'allReduce') await group().allReduceOnDevice(buffers, options)
      else await group().broadcastOnDevice(input, { ...options, source: call.source ?? 0 })
      return buffers.map((buffer) => device.get(buffer))
    }
    const output = device.like(input, factor)
    if (call.kind === 'allGather') await group().allGatherOnDevice(input, output, options)
    else await group().reduceScatterOnDevice(input, output, options)
    return [device.get(output)]
  } finally {
    device.free()
  }
}

function bytesOf({ data }: Tensor): Uint8Array {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
}

/** What the process has open, and the threads that the stub and the package started for it. */
function held() {
  const threads = readdirSync('/proc/self/task').length
  const maps = readFileSync('/proc/self/maps', 'utf8').split('\n')
  const shared = maps.filter((line) => line.includes(process.env.STUB_FOLDER ?? '?') && line.includes('rw-s')).length
  return { descriptors: readdirSync('/proc/self/fd').length, shared, threads }
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
      return init(command.rank, command.worldSize, command.options, command.env)
    case 'run':
      return run(command.call)
    case 'runAll':
      return runAll(command.calls)
    case 'abortSignal':
      return controller.abort(new Error('the user pressed stop'))
    case 'abort':
      return group().abort(new Error(command.message))
    case 'env':
      Object.assign(process.env, command.env)
      return undefined
    case 'breakStore':
      store.broken = new RankwiseError('RANK_LOST', 'the process that holds the store is gone', {
        actual: { ranks: [0] },
      })
      return undefined
    case 'block':
      return block(command.ms)
    case 'held':
      return held()
    case 'destroy':
      await collectives?.destroy()
      collectives = undefined
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

process.on('message', async (message: (Command & { id: number }) | { answer: number }) => {
  if ('answer' in message) return
  const { id, ...command } = message
  const started = performance.now()
  let reply: Reply
  try {
    reply = { id, value: await obey(command as Command) }
  } catch (error) {
    reply = { id, error: report(error), ms: performance.now() - started }
  }
  if (process.connected) process.send?.(reply)
})

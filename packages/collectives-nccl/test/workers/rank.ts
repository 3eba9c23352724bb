import { readdirSync, readFileSync } from 'node:fs'
import { itemSize, RankwiseError, sizeOf, Tensor, viewAs } from '@rankwise/core'
import { CudaRuntime } from '../../src/cuda-runtime.ts'
import { type DeviceBuffer, type NcclCollectives, ncclCollectives } from '../../src/index.ts'
import { IpcStore } from '../ipc-store.ts'
import type { Call, Command, GroupOptions, Reply, Report, TensorBytes } from '../ranks.ts'

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
  { timeoutMs = 20_000, ...options }: GroupOptions,
  env: Record<string, string>,
): Promise<void> {
  for (const name of Object.keys(process.env)) if (/^(STUB|NCCL)_/.test(name)) delete process.env[name]
  Object.assign(process.env, env)
  store.broken = undefined
  controller = new AbortController()
  const place = { rank, worldSize, localRank: rank, localWorldSize: worldSize }
  const rendezvous = { ...place, masterAddr: '127.0.0.1', masterPort: 1, timeoutMs }
  collectives = await ncclCollectives(rendezvous, { ...options, store, signal: controller.signal })
}

async function run(call: Call): Promise<Uint8Array[]> {
  controller = new AbortController()
  const options = { signal: controller.signal, ...(call.op ? { op: call.op } : {}) }
  if (call.onDevice) return runOnDevice(call, options)
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

async function runOnDevice(call: Call, options: object): Promise<Uint8Array[]> {
  const device = await OnDevice.open()
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

/** Buffers on the device, filled and read through pinned memory, as a backend would. */
class OnDevice {
  readonly #cuda: CudaRuntime
  readonly #stream: bigint
  readonly #free: (() => void)[] = []

  private constructor(cuda: CudaRuntime) {
    this.#cuda = cuda
    cuda.setDevice(0)
    this.#stream = cuda.createStream()
    this.#free.push(() => cuda.destroyStream(this.#stream))
  }

  static async open(): Promise<OnDevice> {
    return new OnDevice(await CudaRuntime.load({}))
  }

  put({ dtype, shape, bytes }: TensorBytes): DeviceBuffer {
    const buffer = this.#allocate(dtype, shape)
    if (bytes.length === 0) return buffer
    const pinned = this.#pinned(bytes.length)
    pinned.bytes.set(bytes)
    this.#cuda.copyToDevice(buffer.dataPtr, pinned.address, bytes.length, this.#stream)
    this.#wait()
    return buffer
  }

  like({ dtype, shape: [rows = 0, ...rest] }: DeviceBuffer, factor: number): DeviceBuffer {
    return this.#allocate(dtype, [rows * factor, ...rest])
  }

  get({ dataPtr, dtype, shape }: DeviceBuffer): Uint8Array {
    const length = sizeOf(shape) * itemSize(dtype)
    if (length === 0) return new Uint8Array(0)
    const pinned = this.#pinned(length)
    this.#cuda.copyToHost(pinned.address, dataPtr, length, this.#stream)
    this.#wait()
    return pinned.bytes.slice()
  }

  free(): void {
    for (const free of this.#free.reverse()) free()
  }

  #allocate(dtype: DeviceBuffer['dtype'], shape: DeviceBuffer['shape']): DeviceBuffer {
    const dataPtr = this.#cuda.allocate(Math.max(1, sizeOf(shape) * itemSize(dtype)))
    this.#free.push(() => this.#cuda.free(dataPtr))
    return { dataPtr, dtype, shape }
  }

  #pinned(length: number) {
    const pinned = this.#cuda.allocatePinned(length)
    this.#free.push(() => this.#cuda.freePinned(pinned))
    return pinned
  }

  #wait(): void {
    const event = this.#cuda.createEvent()
    this.#cuda.recordEvent(event, this.#stream)
    while (!this.#cuda.hasHappened(event)) {
      // a copy of a few kilobytes
    }
    this.#cuda.destroyEvent(event)
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
      return Promise.all(command.calls.map(run))
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

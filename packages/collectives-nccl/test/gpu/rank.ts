// One rank of one scenario of `pnpm test:gpu`.
import { setTimeout } from 'node:timers/promises'
import { allocate, type DType, itemSize, type ReduceOp, rendezvousFromEnv, Tensor, viewAs } from '@rankwise/core'
import {
  type DeviceBuffer,
  type NcclCollectives,
  type NcclCollectivesOptions,
  ncclCollectives,
} from '../../src/index.ts'
import { OnDevice } from '../on-device.ts'
import { firstDifference, REDUCIBLE, reduceSequentially } from '../oracle.ts'
import type { Scenario } from './scenarios.ts'

const OPS: readonly ReduceOp[] = ['sum', 'max', 'min']
const ELEMENTS = 10_007
const NOTICE_MS = 2_000
const STAGING_MIB = [1, 4, 8, 32]

/** One measurement; bytes per second count every byte of the tensor once. */
interface Row {
  readonly engine: 'nccl'
  readonly place: 'device' | 'host'
  readonly ranks: number
  readonly checked: boolean
  readonly stagingMiB?: number
  readonly bytes: number
  readonly microseconds: number
  readonly gigabytesPerSecond: number
}

const [, , scenario, byteList = ''] = process.argv as [string, string, Scenario['name'], string]
const rendezvous = rendezvousFromEnv()
const { rank, worldSize, localRank } = rendezvous
const everyRank = Array.from({ length: worldSize }, (_, r) => r)

const RUN: Record<Scenario['name'], () => Promise<unknown>> = { results, mismatch, abort, kill, time }
try {
  process.send?.({ value: await RUN[scenario]() })
} catch (error) {
  process.exitCode = 1
  process.send?.({ failure: error instanceof Error ? error.message : String(error) })
}
process.disconnect()

function join(options: NcclCollectivesOptions = {}): Promise<NcclCollectives> {
  return ncclCollectives(rendezvous, { device: localRank, ...options })
}

/** Every dtype and reduction, in host and device memory, against the sum in JavaScript. */
async function results(): Promise<unknown> {
  await using group = await join({ stagingBytes: 16_384 })
  for (const dtype of REDUCIBLE) {
    const device = await OnDevice.open(localRank)
    const parts = everyRank.map((r) => numbers(dtype, ELEMENTS * worldSize, r))
    const mine = parts[rank] as Uint8Array
    for (const op of OPS) {
      const expected = reduceSequentially(dtype, op, parts)
      const share = expected.length / worldSize
      const own = expected.slice(rank * share, (rank + 1) * share)
      const host = tensorOf(dtype, mine)
      await group.allReduce([host], { op })
      requireEqual(`allReduce ${op}`, dtype, bytesOf(host), expected)
      requireEqual(`reduceScatter ${op}`, dtype, bytesOf(await group.reduceScatter(tensorOf(dtype, mine), { op })), own)
      const [buffer, input] = [put(device, dtype, mine), put(device, dtype, mine)]
      const output = device.like(input, 1 / worldSize)
      await group.allReduceOnDevice([buffer], { op })
      requireEqual(`allReduceOnDevice ${op}`, dtype, device.get(buffer), expected)
      await group.reduceScatterOnDevice(input, output, { op })
      requireEqual(`reduceScatterOnDevice ${op}`, dtype, device.get(output), own)
    }
    await checkMoves(group, device, dtype, parts)
    device.free()
  }
  await group.barrier()
  return undefined
}

async function checkMoves(group: NcclCollectives, device: OnDevice, dtype: DType, parts: readonly Uint8Array[]) {
  const [mine, last] = [parts[rank] as Uint8Array, worldSize - 1]
  const all = new Uint8Array(Buffer.concat(parts))
  requireEqual('allGather', dtype, bytesOf(await group.allGather(tensorOf(dtype, mine))), all)
  const host = tensorOf(dtype, mine)
  await group.broadcast(host, { source: last })
  requireEqual('broadcast', dtype, bytesOf(host), parts[last] as Uint8Array)
  const [input, buffer] = [put(device, dtype, mine), put(device, dtype, mine)]
  const output = device.like(input, worldSize)
  await group.allGatherOnDevice(input, output)
  requireEqual('allGatherOnDevice', dtype, device.get(output), all)
  await group.broadcastOnDevice(buffer, { source: last })
  requireEqual('broadcastOnDevice', dtype, device.get(buffer), parts[last] as Uint8Array)
}

async function mismatch(): Promise<unknown> {
  await using group = await join()
  return await requireError('COLLECTIVE_MISMATCH', () =>
    group.allReduce([Tensor.zeros('float32', [rank === 0 ? 8 : 16])]),
  )
}

/** Rank 0 waits in an operation that the others do not call, and is stopped. */
async function abort(): Promise<unknown> {
  await using group = await join()
  await group.allReduce([Tensor.zeros('float32', [1024])])
  if (rank > 0) {
    await setTimeout(500)
    return await requireError('RANK_LOST', () => group.barrier())
  }
  const controller = new AbortController()
  const stop = setTimeout(300).then(() => controller.abort())
  const ms = await requireError('ABORTED', () => group.barrier({ signal: controller.signal }))
  await stop
  return ms
}

async function kill(): Promise<unknown> {
  await using group = await join()
  await group.allReduce([Tensor.zeros('float32', [1024])])
  if (rank === 1) {
    await setTimeout(300)
    process.kill(process.pid, 'SIGKILL')
  }
  return await requireError('RANK_LOST', () => group.allReduce([Tensor.zeros('float32', [1024])]))
}

async function time(): Promise<Row[]> {
  const sizes = byteList.split(',').map(Number)
  const rows: Row[] = []
  for (const checkFirst of [Number.POSITIVE_INFINITY, 0]) {
    await using group = await join({ checkFirst })
    const device = await OnDevice.open(localRank)
    for (const bytes of sizes) {
      const buffer = put(device, 'float32', new Uint8Array(bytes))
      const tensor = tensorOf('float32', new Uint8Array(bytes))
      const common = { ranks: worldSize, checked: checkFirst > 0, bytes }
      rows.push(await measure(group, { ...common, place: 'device' }, () => group.allReduceOnDevice([buffer])))
      rows.push(await measure(group, { ...common, place: 'host', stagingMiB: 8 }, () => group.allReduce([tensor])))
    }
    device.free()
  }
  const largest = Math.max(...sizes)
  for (const stagingMiB of STAGING_MIB) {
    await using group = await join({ stagingBytes: stagingMiB * 2 ** 20 })
    const tensor = tensorOf('float32', new Uint8Array(largest))
    const row = { ranks: worldSize, checked: true, bytes: largest, place: 'host' as const, stagingMiB }
    rows.push(await measure(group, row, () => group.allReduce([tensor])))
  }
  return rows
}

/** The median; ranks agree on how often from the size alone. */
async function measure(
  group: NcclCollectives,
  row: Omit<Row, 'engine' | 'microseconds' | 'gigabytesPerSecond'>,
  operation: () => Promise<void>,
): Promise<Row> {
  const repeats = Math.min(50, Math.max(7, Math.round(3e8 / row.bytes)))
  for (let i = 0; i < 3; i++) await operation()
  await group.barrier()
  const times: number[] = []
  for (let i = 0; i < repeats; i++) {
    const start = performance.now()
    await operation()
    times.push(performance.now() - start)
  }
  const ms = times.sort((a, b) => a - b)[Math.floor(repeats / 2)] as number
  const round = (value: number) => Number(value.toPrecision(4))
  return { engine: 'nccl', ...row, microseconds: round(ms * 1e3), gigabytesPerSecond: round(row.bytes / ms / 1e6) }
}

async function requireError(code: string, operation: () => Promise<unknown>): Promise<number> {
  const start = performance.now()
  const error = await operation().then(
    () => undefined,
    (caught: { code?: string; message: string }) => caught,
  )
  const ms = performance.now() - start
  if (error?.code !== code) throw new Error(`expected ${code}, got ${error?.message ?? 'no error'}`)
  if (ms > NOTICE_MS) throw new Error(`${code} came after ${Math.round(ms)} ms`)
  return ms
}

function requireEqual(what: string, dtype: DType, actual: Uint8Array, expected: Uint8Array): void {
  const index = firstDifference(dtype, actual, expected)
  if (index !== undefined) throw new Error(`${what} of ${dtype}: element ${index} of ${actual.length} bytes differs`)
}

/** Small numbers with few digits, of which sums are exact in every order and dtype that does not overflow. */
function numbers(dtype: DType, elements: number, seed: number): Uint8Array {
  const values = Float32Array.from({ length: elements }, (_, i) => ((i * 7 + seed * 13) % 31) + 1)
  const { data } = new Tensor('float32', [elements], values).cast(dtype)
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
}

function put(device: OnDevice, dtype: DType, bytes: Uint8Array): DeviceBuffer {
  return device.put({ dtype, shape: [bytes.length / itemSize(dtype)], bytes })
}

function tensorOf(dtype: DType, bytes: Uint8Array): Tensor {
  const elements = bytes.length / itemSize(dtype)
  const data = allocate(dtype, elements)
  new Uint8Array(data.buffer).set(bytes)
  return new Tensor(dtype, [elements], viewAs(dtype, new Uint8Array(data.buffer)))
}

function bytesOf({ data }: Tensor): Uint8Array {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
}

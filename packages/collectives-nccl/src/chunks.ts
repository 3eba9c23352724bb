import { bytesOf, itemSize, type PackedTensors, type ReduceOp, type Tensor } from '@rankwise/core'
import type { Communicator } from './communicator.ts'
import type { Chunk } from './staging.ts'

/** Parts of a slot start where the GPU reads and writes best, and where every dtype is aligned. */
export const ALIGNMENT = 256

const NOTHING = { start: 0, length: 0 }

/** The group as the chunks see it. */
export interface ChunkContext {
  readonly communicator: Communicator
  readonly rank: number
  readonly worldSize: number
  readonly slotBytes: number
}

/** An all-reduce of tensors of one dtype, in place. */
export function* reduceChunks(
  { communicator: { nccl, channel }, slotBytes }: ChunkContext,
  packed: PackedTensors,
  op: ReduceOp,
): Generator<Chunk> {
  const { dtype } = packed
  for (let start = 0; start < packed.byteLength; start += slotBytes) {
    const length = Math.min(slotBytes, packed.byteLength - start)
    yield {
      upload: { start: 0, length },
      download: { start: 0, length },
      fill: (slot) => packed.copyTo(slot, 0, start, length),
      issue: (device) =>
        nccl.allReduce({ send: device, receive: device, count: length / itemSize(dtype) }, dtype, op, channel),
      drain: (slot) => packed.copyFrom(slot, 0, start, length),
    }
  }
}

/** An all-gather. A chunk holds the same part of every rank, one after the other. */
export function* gatherChunks(
  { communicator: { nccl, channel }, rank, worldSize, slotBytes }: ChunkContext,
  input: Uint8Array,
  output: Uint8Array,
): Generator<Chunk> {
  const partBytes = partOf(slotBytes, worldSize)
  for (let start = 0; start < input.length; start += partBytes) {
    const length = Math.min(partBytes, input.length - start)
    yield {
      upload: { start: rank * length, length },
      download: { start: 0, length: worldSize * length },
      fill: (slot) => slot.set(input.subarray(start, start + length), rank * length),
      issue: (device) =>
        nccl.allGather({ send: device + BigInt(rank * length), receive: device, count: length }, channel),
      drain(slot) {
        for (let from = 0; from < worldSize; from++) {
          output.set(slot.subarray(from * length, (from + 1) * length), from * input.length + start)
        }
      },
    }
  }
}

/** A reduce-scatter. A chunk holds the same part of what every rank is left with, one after the other. */
export function* scatterChunks(
  { communicator: { nccl, channel }, rank, worldSize, slotBytes }: ChunkContext,
  input: Tensor,
  output: Tensor,
  op: ReduceOp,
): Generator<Chunk> {
  const { dtype } = input
  const [source, target] = [bytesOf(input), bytesOf(output)]
  const partBytes = partOf(slotBytes, worldSize)
  for (let start = 0; start < target.length; start += partBytes) {
    const length = Math.min(partBytes, target.length - start)
    const mine = { start: rank * length, length }
    yield {
      upload: { start: 0, length: worldSize * length },
      download: mine,
      fill(slot) {
        for (let to = 0; to < worldSize; to++) {
          const from = to * target.length + start
          slot.set(source.subarray(from, from + length), to * length)
        }
      },
      issue(device) {
        const receive = device + BigInt(mine.start)
        nccl.reduceScatter({ send: device, receive, count: length / itemSize(dtype) }, dtype, op, channel)
      },
      drain: (slot) => target.set(slot.subarray(mine.start, mine.start + length), start),
    }
  }
}

/** A broadcast, in place. */
export function* broadcastChunks(
  { communicator: { nccl, channel }, rank, slotBytes }: ChunkContext,
  data: Uint8Array,
  source: number,
): Generator<Chunk> {
  for (let start = 0; start < data.length; start += slotBytes) {
    const length = Math.min(slotBytes, data.length - start)
    const all = { start: 0, length }
    yield {
      upload: rank === source ? all : NOTHING,
      download: rank === source ? NOTHING : all,
      fill(slot) {
        if (rank === source) slot.set(data.subarray(start, start + length))
      },
      issue: (device) => nccl.broadcast({ send: device, receive: device, count: length }, source, channel),
      drain(slot) {
        if (rank !== source) data.set(slot.subarray(0, length), start)
      },
    }
  }
}

function partOf(slotBytes: number, worldSize: number): number {
  return Math.floor(slotBytes / worldSize / ALIGNMENT) * ALIGNMENT
}

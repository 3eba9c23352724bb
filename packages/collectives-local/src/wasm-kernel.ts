import { type DType, type DTypeArrays, itemSize, RankwiseError } from '@rankwise/core'
import type { Reduce } from './kernel.ts'
import { WASM_MODULE } from './wasm-module.ts'

interface Memory {
  readonly buffer: ArrayBuffer
  grow(pages: number): number
}

/** The part of WebAssembly that is used here: its types come with those of browsers only. */
interface WebAssemblyApi {
  instantiate(
    bytes: Uint8Array,
  ): Promise<{ readonly instance: { readonly exports: Readonly<Record<string, unknown>> } }>
}

type Combine = (ranks: number, stride: number, count: number) => void

/**
 * Bytes of one contribution that are copied into the memory of the module, combined and copied out at a time. The module
 * cannot reach the arena itself. Two ranks of float32, measured: 5.6 GB/s with 4 KiB, 6.8 with 16 KiB, 6.2 with 64 KiB.
 */
const BLOCK_BYTES = 16_384
const PAGE_BYTES = 65_536
/** Longest vector, in elements: a block is rounded up to whole ones. */
const VECTOR = 4

/** @throws RankwiseError `KERNEL_UNAVAILABLE` where WebAssembly has no SIMD. */
export async function loadWasmKernel(): Promise<Reduce> {
  let exports: Readonly<Record<string, unknown>>
  try {
    const { WebAssembly } = globalThis as unknown as { WebAssembly: WebAssemblyApi }
    const { instance } = await WebAssembly.instantiate(Buffer.from(WASM_MODULE, 'base64'))
    exports = instance.exports
  } catch (cause) {
    throw new RankwiseError('KERNEL_UNAVAILABLE', 'the WebAssembly kernel does not load', {
      actual: { node: process.version },
      rule: "kernel 'wasm' needs WebAssembly with SIMD",
      remedy: "choose kernel 'auto'",
      cause,
    })
  }
  const memory = exports.memory as Memory
  return (dtype, op, sources, target) => {
    const combine = exports[`${dtype}_${op}`] as Combine
    reserve(memory, sources.length * BLOCK_BYTES)
    reduceBlocks(memory, combine, dtype, sources, target)
  }
}

function reserve(memory: Memory, bytes: number): void {
  const missing = bytes - memory.buffer.byteLength
  if (missing > 0) memory.grow(Math.ceil(missing / PAGE_BYTES))
}

function reduceBlocks(
  memory: Memory,
  combine: Combine,
  dtype: DType,
  sources: readonly DTypeArrays[DType][],
  target: DTypeArrays[DType],
): void {
  const bytes = new Uint8Array(memory.buffer)
  const inputs = sources.map(bytesOf)
  const output = bytesOf(target)
  for (let start = 0; start < output.length; start += BLOCK_BYTES) {
    const size = Math.min(BLOCK_BYTES, output.length - start)
    for (const [rank, input] of inputs.entries()) {
      bytes.set(input.subarray(start, start + size), rank * BLOCK_BYTES)
    }
    combine(inputs.length, BLOCK_BYTES, Math.ceil(size / itemSize(dtype) / VECTOR) * VECTOR)
    output.set(bytes.subarray(0, size), start)
  }
}

function bytesOf({ buffer, byteOffset, byteLength }: DTypeArrays[DType]): Uint8Array {
  return new Uint8Array(buffer, byteOffset, byteLength)
}

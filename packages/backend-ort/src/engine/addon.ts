import { createRequire } from 'node:module'
import { dirname, join } from 'node:path'
import type { TensorData } from '@rankwise/core'
import { engineError } from './engine-error.ts'

/** A thread of the addon that calls ONNX Runtime. */
export type NativeEngine = { readonly nativeEngine: unique symbol }

/** A graph as the addon knows it. */
export type NativeGraph = { readonly nativeGraph: unique symbol }

/** An input or output of a graph. */
export interface Port {
  readonly name: string
  /** As `TensorProto.DataType` of onnx.proto numbers them. */
  readonly elementType: number
  readonly itemBytes: number
  readonly shape: readonly number[]
}

/** What native/addon.c exports. Its errors say what ONNX Runtime says. */
export interface Addon {
  readonly protocol: number
  /** What `rankwise.Linear` multiplies with on this processor. */
  readonly instructionSet: 'avx512' | 'avx2' | 'baseline'
  /**
   * Loads ONNX Runtime, once in a process, and starts a thread.
   *
   * @param processors - of the threads beside that one, as ONNX Runtime takes them: `2;3`
   * @param processor - of that one, from 0; -1 for any
   */
  open(library: string, threads: number, processors: string | null, processor: number): NativeEngine
  /** After all promises are settled and all graphs unloaded; idempotent. */
  close(engine: NativeEngine): void
  /** @param ports - inputs, then outputs */
  describe(ports: readonly Port[], inputCount: number): NativeGraph
  load(engine: NativeEngine, graph: NativeGraph, model: Uint8Array): Promise<void>
  /**
   * Reads the inputs and writes the outputs where they are.
   *
   * @param data - of inputs, then outputs; stays as it is. Addresses on the GPU after `cudaAttach`
   */
  run(engine: NativeEngine, graph: NativeGraph, data: readonly (TensorData | bigint)[]): Promise<void>
  unload(engine: NativeEngine, graph: NativeGraph): Promise<void>
  /** Of ONNX Runtime, after `open`. */
  version(): string
  /** Loads libcudart, once in a process, and counts the GPUs that it sees. @param library - what the dynamic linker takes */
  cudaDevices(library: string): number
  /** From then on the engine computes on a GPU, in a stream of its own. Once for an engine, before its first graph. */
  cudaAttach(engine: NativeEngine, device: number): Promise<void>
  /** Of an engine with a GPU. */
  cudaStream(engine: NativeEngine): bigint
  /** Address of memory with any content, which `close` frees at the latest. */
  cudaAllocate(engine: NativeEngine, bytes: number): bigint
  cudaFree(engine: NativeEngine, address: bigint): void
  /** Copies to the GPU after what the engine was given before. @param data - stays as it is meanwhile */
  cudaWrite(engine: NativeEngine, address: bigint, data: TensorData): Promise<void>
  /** Copies from the GPU after what the engine was given before. */
  cudaRead(engine: NativeEngine, address: bigint, data: TensorData): Promise<void>
}

/** As PROTOCOL in native/addon.c: an addon that was compiled from other sources must not run. */
const PROTOCOL = 2

const require = createRequire(import.meta.url)
/** Of this package: sources and what is built of them lie at different depths. */
const FOLDER = dirname(require.resolve('@rankwise/backend-ort/package.json'))

/** @throws RankwiseError `ORT_ENGINE` when there is no addon for this platform, or it does not load */
export function loadAddon(folder: string = FOLDER): Addon {
  try {
    const addon: Addon = require('node-gyp-build')(folder)
    if (addon.protocol !== PROTOCOL) throw new Error(`it has protocol ${addon.protocol}, not ${PROTOCOL}`)
    return addon
  } catch (cause) {
    throw engineError('the addon does not load', {
      where: join(folder, 'prebuilds'),
      remedy: `run \`node native/build.mjs\` in ${folder}, which needs a C compiler`,
      cause,
    })
  }
}

/** Path of the library that the npm package onnxruntime-node ships. @throws RankwiseError `ORT_ENGINE` */
export function libraryPath(): string {
  try {
    const manifest = require.resolve('onnxruntime-node/package.json')
    return join(manifest, '..', 'bin', 'napi-v6', process.platform, process.arch, 'libonnxruntime.so.1')
  } catch (cause) {
    throw engineError('onnxruntime-node is not installed', { remedy: 'install onnxruntime-node', cause })
  }
}

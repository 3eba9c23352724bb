import { type RankwiseError, sizeOf, Tensor, viewAs } from '@rankwise/core'
import { ELEMENT_BYTES, ELEMENT_TYPES, type OnnxModel, type OnnxValueInfo } from '../onnx/model.ts'
import { writeModel } from '../onnx/model-writer.ts'
import type { GraphTarget } from '../onnx/onnx-builder.ts'
import { type Addon, libraryPath, loadAddon, type NativeEngine, type NativeGraph, type Port } from './addon.ts'
import { BufferPool } from './buffer-pool.ts'
import type { Engine, Session } from './engine.ts'
import { engineError } from './engine-error.ts'
import type { ThreadPlacement } from './pinning.ts'
import { compileError, messageOf, runError, shapeError } from './session-error.ts'

/** How the engine is made. */
export interface CapiOptions {
  readonly threads: number
  /** @default any processors */
  readonly placement?: ThreadPlacement | undefined
}

/**
 * ONNX Runtime through its C API. Loading and running happen on a thread of the engine, one after the other, so the event
 * loop goes on meanwhile; inputs are read and results written where they are. The sessions of a process share one arena,
 * and one pool of threads where they have equally many.
 */
export class CapiEngine implements Engine {
  readonly name = 'capi'
  readonly threads: number
  readonly target: GraphTarget
  readonly #addon: Addon
  readonly #native: NativeEngine
  readonly #pool = new BufferPool()

  private constructor(addon: Addon, native: NativeEngine, threads: number) {
    this.#addon = addon
    this.#native = native
    this.threads = threads
    // Without vector instructions, casting weights and multiplying by ONNX Runtime's own kernels is faster.
    this.target = { halfInputs: 'floats', hasLinear: addon.instructionSet !== 'baseline' }
  }

  /** @throws RankwiseError `ORT_ENGINE` when there is no addon, or no library that it can call */
  static open({ threads, placement }: CapiOptions, addon: Addon = loadAddon()): CapiEngine {
    const library = libraryPath()
    try {
      const native = addon.open(library, threads, placement?.pool ?? null, placement?.first ?? -1)
      return new CapiEngine(addon, native, threads)
    } catch (cause) {
      throw engineError('ONNX Runtime does not load', {
        where: library,
        remedy: 'install onnxruntime-node anew',
        cause,
      })
    }
  }

  /** Version of ONNX Runtime. */
  get version(): string {
    return this.#addon.version()
  }

  /** @throws RankwiseError `ORT_COMPILE` */
  async createSession(model: OnnxModel): Promise<Session> {
    const { inputs, outputs } = model
    const graph = this.#addon.describe([...inputs, ...outputs].map(portOf), inputs.length)
    try {
      await this.#addon.load(this.#native, graph, writeModel(model))
    } catch (cause) {
      throw compileError(model, cause)
    }
    return new CapiSession(model, graph, { addon: this.#addon, native: this.#native, pool: this.#pool })
  }

  recycle({ data: { buffer } }: Tensor): void {
    this.#pool.give(buffer as ArrayBuffer)
  }

  async dispose(): Promise<void> {
    this.#pool.clear()
    this.#addon.close(this.#native)
  }
}

interface SessionContext {
  readonly addon: Addon
  readonly native: NativeEngine
  readonly pool: BufferPool
}

class CapiSession implements Session {
  readonly #model: OnnxModel
  readonly #graph: NativeGraph
  readonly #context: SessionContext

  constructor(model: OnnxModel, graph: NativeGraph, context: SessionContext) {
    this.#model = model
    this.#graph = graph
    this.#context = context
  }

  async run(inputs: readonly Tensor[]): Promise<readonly Tensor[]> {
    const { addon, native, pool } = this.#context
    const results = this.#model.outputs.map((info) => tensorFor(info, pool))
    const data = [...inputs, ...results].map((tensor) => tensor.data)
    try {
      await addon.run(native, this.#graph, data)
    } catch (cause) {
      for (const { data } of results) pool.give(data.buffer as ArrayBuffer)
      throw computedShapeError(this.#model, cause) ?? runError(this.#model, cause)
    }
    return results
  }

  /** Memory for results of its shapes is not kept either. */
  async release(): Promise<void> {
    const { addon, native, pool } = this.#context
    pool.clear()
    await addon.unload(native, this.#graph)
  }
}

function portOf({ name, dtype, shape }: OnnxValueInfo): Port {
  return { name, elementType: ELEMENT_TYPES[dtype], itemBytes: ELEMENT_BYTES[dtype], shape }
}

function tensorFor({ dtype, shape }: OnnxValueInfo, pool: BufferPool): Tensor {
  const buffer = pool.take(sizeOf(shape) * ELEMENT_BYTES[dtype])
  const host = dtype === 'int32' || dtype === 'bfloat16' ? dtype : 'float32'
  return new Tensor(host, shape, viewAs(host, new Uint8Array(buffer)))
}

/** ONNX Runtime refuses to write a result to memory for another shape, and says so in these words. */
function computedShapeError({ outputs }: OnnxModel, cause: unknown): RankwiseError | undefined {
  const match = /provided for output '(.*?)' of node .* but the computed output shape for this run is \{(.*?)\}/.exec(
    messageOf(cause),
  )
  const info = outputs.find(({ name }) => name === match?.[1])
  if (match === null || info === undefined) return undefined
  return shapeError(info, match[2]?.split(',').filter(Boolean).map(Number) ?? [])
}

import { sizeOf, Tensor, type TensorData, viewAs } from '@rankwise/core'
import { ELEMENT_BYTES, type OnnxModel, type OnnxValueInfo } from '../onnx/model.ts'
import type { GraphTarget } from '../onnx/onnx-builder.ts'
import { type Addon, libraryPath, loadAddon, type NativeEngine } from './addon.ts'
import { BufferPool } from './buffer-pool.ts'
import { CapiSession, type ValueMemory } from './capi-session.ts'
import type { Engine, Session } from './engine.ts'
import { engineError } from './engine-error.ts'
import type { ThreadPlacement } from './pinning.ts'

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
  readonly #memory = new HostMemory()

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
  createSession(model: OnnxModel): Promise<Session> {
    return CapiSession.create(model, { addon: this.#addon, native: this.#native, memory: this.#memory })
  }

  recycle(result: Tensor): void {
    this.#memory.give(result)
  }

  async dispose(): Promise<void> {
    this.#memory.clear()
    this.#addon.close(this.#native)
  }
}

/** Tensors of the host. */
class HostMemory implements ValueMemory<Tensor> {
  readonly #pool = new BufferPool()

  take({ dtype, shape }: OnnxValueInfo): Tensor {
    const buffer = this.#pool.take(sizeOf(shape) * ELEMENT_BYTES[dtype])
    const host = dtype === 'int32' || dtype === 'bfloat16' ? dtype : 'float32'
    return new Tensor(host, shape, viewAs(host, new Uint8Array(buffer)))
  }

  give({ data: { buffer } }: Tensor): void {
    this.#pool.give(buffer as ArrayBuffer)
  }

  data({ data }: Tensor): TensorData {
    return data
  }

  clear(): void {
    this.#pool.clear()
  }
}

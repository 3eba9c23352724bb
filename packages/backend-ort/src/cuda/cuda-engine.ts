import type { Environment, Tensor } from '@rankwise/core'
import { type Addon, libraryPath, loadAddon, type NativeEngine } from '../engine/addon.ts'
import { CapiSession } from '../engine/capi-session.ts'
import type { Engine, Session } from '../engine/engine.ts'
import { engineProblem } from '../engine/self-check.ts'
import type { OnnxModel } from '../onnx/model.ts'
import type { GraphTarget } from '../onnx/onnx-builder.ts'
import { cudaError } from './cuda-error.ts'
import { chooseDevice, countDevices } from './devices.ts'
import { type GpuBuffer, GpuMemory } from './gpu-memory.ts'

/**
 * Bytes that one cast of a weight may give: all of most weights, since products on a GPU gain from being large, and it has the
 * memory. Not measured.
 */
const CAST_BYTES = 2 ** 28

/** Of the threads beside the GPU: it computes everything. */
const THREADS = 1

/** How the engine is made. */
export interface CudaOptions {
  /** @default see {@link chooseDevice} */
  readonly deviceId?: number | undefined
  readonly env?: Environment
}

/**
 * ONNX Runtime's CUDA provider, through its C API. Loading, running and copying happen on a thread of the engine, one after the
 * other, in one stream.
 */
export class CudaEngine implements Engine<GpuBuffer> {
  readonly name = 'capi'
  readonly threads = THREADS
  readonly target: GraphTarget = { halfInputs: 'floats', hasLinear: false, castBytes: CAST_BYTES }
  /** Number of the GPU among those that the process sees. */
  readonly deviceId: number
  readonly memory: GpuMemory
  readonly #addon: Addon
  readonly #native: NativeEngine

  private constructor(addon: Addon, native: NativeEngine, deviceId: number) {
    this.deviceId = deviceId
    this.memory = new GpuMemory(addon, native)
    this.#addon = addon
    this.#native = native
  }

  /** @throws RankwiseError `ORT_CUDA` */
  static async open({ deviceId, env }: CudaOptions, addon: Addon = addonForCuda()): Promise<CudaEngine> {
    const device = chooseDevice(countDevices(addon, env), deviceId, env)
    const native = openLibrary(addon)
    try {
      await addon.cudaAttach(native, device)
    } catch (cause) {
      addon.close(native)
      throw cudaError('the GPU cannot be used', {
        where: `GPU ${device}`,
        remedy: 'check `nvidia-smi` and what else computes there',
        cause,
      })
    }
    const engine = new CudaEngine(addon, native, device)
    try {
      await requireProvider(engine)
      return engine
    } catch (error) {
      await engine.dispose()
      throw error
    }
  }

  /** What everything is queued on, a `cudaStream_t`. */
  get stream(): bigint {
    return this.#addon.cudaStream(this.#native)
  }

  /** @throws RankwiseError `ORT_COMPILE` */
  createSession(model: OnnxModel): Promise<Session<GpuBuffer>> {
    return CapiSession.create(model, { addon: this.#addon, native: this.#native, memory: this.memory })
  }

  recycle(result: GpuBuffer): void {
    this.memory.give(result)
  }

  async dispose(): Promise<void> {
    await this.memory.dispose()
    this.#addon.close(this.#native)
  }
}

function addonForCuda(): Addon {
  try {
    return loadAddon()
  } catch (cause) {
    throw cudaError('it takes the addon of this package, which does not load', {
      remedy: 'run `node native/build.mjs` in the folder of @rankwise/backend-ort, which needs Linux and a C compiler',
      cause,
    })
  }
}

function openLibrary(addon: Addon): NativeEngine {
  const library = libraryPath()
  try {
    return addon.open(library, THREADS, null, -1)
  } catch (cause) {
    throw cudaError('ONNX Runtime does not load', { where: library, remedy: 'install onnxruntime-node anew', cause })
  }
}

/** Runs graphs of which the results are known. @throws RankwiseError `ORT_CUDA` with what went wrong */
async function requireProvider(engine: CudaEngine): Promise<void> {
  const problem = await engineProblem(hostView(engine), { checksIndices: false })
  if (problem === undefined) return
  throw cudaError(`ONNX Runtime's CUDA provider does not work: ${problem.trim()}`, {
    where: libraryPath(),
    actual: { deviceId: engine.deviceId },
    remedy:
      'have its files beside that one: `node script/install.js --onnxruntime-node-install=cuda12` in the folder of ' +
      'onnxruntime-node downloads them; and the CUDA libraries that `ldd libonnxruntime_providers_cuda.so` misses on ' +
      'LD_LIBRARY_PATH',
  })
}

/** The engine as one that takes tensors of the host. */
function hostView(engine: CudaEngine): Engine {
  const { memory } = engine
  const put = async (tensor: Tensor) => {
    const buffer = memory.allocate(tensor.dtype as GpuBuffer['dtype'], tensor.shape)
    await memory.write(buffer, tensor)
    return buffer
  }
  return {
    name: engine.name,
    threads: engine.threads,
    target: engine.target,
    async createSession(model) {
      const session = await engine.createSession(model)
      const run = async (tensors: readonly Tensor[]) => {
        const inputs = await Promise.all(tensors.map(put))
        const results = await session.run(inputs)
        const values = await Promise.all(results.map((result) => memory.read(result)))
        for (const buffer of [...inputs, ...results]) memory.give(buffer)
        return values
      }
      return { run, release: () => session.release() }
    },
    recycle() {},
    dispose: () => engine.dispose(),
  }
}

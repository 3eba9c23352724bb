import { RankwiseError } from '@rankwise/core'
import { OrtBackend } from './backend.ts'
import { CudaDevice } from './cuda/cuda-device.ts'
import { CudaEngine } from './cuda/cuda-engine.ts'
import { ENGINE_VARIABLE, type EngineChoice, selectEngine } from './engine/engine-selection.ts'
import { HostDevice } from './host-device.ts'
import { checkThreads, defaultThreads } from './threads.ts'
import { WeightLoader, type WeightsMode } from './weight-loader.ts'

/** Options of `ort`. */
export interface OrtOptions {
  /**
   * Where it computes. `'cuda'`: on an NVIDIA GPU, with its values and weights in memory of the GPU, by ONNX Runtime's CUDA
   * provider; all-reduces of `nccl` collectives take place there. Takes Linux, the engine `'capi'`, and what the README says;
   * nothing falls back to the CPU. Not yet run on a GPU.
   */
  readonly device: 'cpu' | 'cuda'
  /**
   * Number of this rank's GPU among those that the process sees, with `device: 'cuda'`; that of `nccl` collectives is chosen
   * alike.
   *
   * @default localRank, or 0 if the process sees only one
   */
  readonly deviceId?: number | undefined
  /**
   * What calls ONNX Runtime. `'capi'`: our addon, through the C API of the library that onnxruntime-node ships: the event
   * loop goes on while it computes, results are not copied, and steps reuse the memory of earlier ones. `'binding'`: the
   * Node.js binding of onnxruntime-node, wherever that is there. `'auto'`: the first of these that can be used;
   * `backend.selection` says which, and why not the other. Any other choice is that or an error.
   *
   * @default the environment variable `RANKWISE_ORT_ENGINE`, else 'auto'
   */
  readonly engine?: EngineChoice | undefined
  /**
   * Threads that one operation runs on; not with `device: 'cuda'`. On the engine `'capi'`, the backends of a process that
   * have as many threads as its first one share them; others have threads for every segment.
   *
   * @default `max(1, floor(cores / LOCAL_WORLD_SIZE))`, so that the ranks on this machine do not share cores
   */
  readonly threads?: number | undefined
  /**
   * Keeps every thread on a processor of its own, other ones for every rank on this machine. Only on Linux, on the engine
   * `'capi'`.
   *
   * @default false
   */
  readonly pinThreads?: boolean | undefined
  /**
   * Where weights lie. `'mapped'`: in their file, which the ranks of a machine share and which costs no memory of a
   * process; what is not consecutive in a file (the columns of a row-wise weight) is read. `'read'`: in memory of the
   * process. `'auto'`: mapped where that is possible, and read elsewhere; `memory()` says how much is which. While a
   * file is mapped it may be renamed or deleted, but not truncated or written to.
   *
   * @default 'auto'
   */
  readonly weights?: WeightsMode | undefined
}

/**
 * The backend on ONNX Runtime.
 *
 * @throws RankwiseError `BACKEND_DEVICE`, `BACKEND_ENGINE`, `BACKEND_THREADS`, `BACKEND_PINNING`, `BACKEND_WEIGHTS`,
 *   `RENDEZVOUS_ENV`; `ORT_CUDA` when it is to compute on a GPU and cannot; `BACKEND_MAPPING` when weights must be mapped
 *   and nothing can be mapped here, `ORT_ENGINE` when the engine is to be 'capi' and that cannot be used
 */
export async function ort(options: OrtOptions): Promise<OrtBackend> {
  const { device, deviceId } = options
  if (device === 'cuda') return onGpu(options)
  if (device === 'cpu' && deviceId === undefined) return onCpu(options)
  throw new RankwiseError('BACKEND_DEVICE', 'the backend ort cannot compute there', {
    actual: { device, deviceId },
    rule: "device is 'cpu' or 'cuda', and deviceId is given with 'cuda' only",
  })
}

async function onCpu({ engine, threads = defaultThreads(), pinThreads = false, weights = 'auto' }: OrtOptions) {
  const loader = await WeightLoader.create(weights)
  const request = { threads: checkThreads(threads), pinThreads }
  const { engine: opened, selection } = await selectEngine(engine ?? environmentEngine(), request)
  return new OrtBackend(new HostDevice(opened, loader), selection)
}

async function onGpu(options: OrtOptions): Promise<OrtBackend> {
  refuseCpuOptions(options)
  const device = new CudaDevice(await CudaEngine.open({ deviceId: options.deviceId }))
  return new OrtBackend(device, { engine: 'capi', device: device.name, rejected: [] })
}

function refuseCpuOptions(options: OrtOptions): void {
  const { threads, pinThreads, weights = 'auto' } = options
  const engine = options.engine ?? environmentEngine()
  const refuse = (code: string, actual: Readonly<Record<string, unknown>>, rule: string) => {
    throw new RankwiseError(code, "the backend ort has no such option with device: 'cuda'", { actual, rule })
  }
  if (engine !== 'auto' && engine !== 'capi') {
    refuse(
      'BACKEND_ENGINE',
      { engine },
      `on a GPU, engine, or ${ENGINE_VARIABLE} where it is not given, is 'auto' or 'capi'`,
    )
  }
  if (threads !== undefined) refuse('BACKEND_THREADS', { threads }, 'on a GPU, threads is not given')
  if (pinThreads) refuse('BACKEND_PINNING', { pinThreads }, 'on a GPU, pinThreads is false')
  if (weights !== 'auto' && weights !== 'read') {
    refuse('BACKEND_WEIGHTS', { weights }, "on a GPU, weights is 'auto' or 'read': they are copied to its memory")
  }
}

function environmentEngine(): string {
  return process.env[ENGINE_VARIABLE] || 'auto'
}

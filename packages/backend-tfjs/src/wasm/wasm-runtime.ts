import { RankwiseError } from '@rankwise/core'
import type { BackendWasm } from '@tensorflow/tfjs-backend-wasm'
import type { KernelFunc, NamedAttrMap, NamedTensorInfoMap, TensorInfo } from '@tensorflow/tfjs-core'

/** Bytes that the heap of the WebAssembly module can grow to: it has 32-bit addresses. */
export const HEAP_BYTES: number = 2 ** 32

/** The parts of tfjs's wasm backend, version 4.22.0, that are not in its types. */
export interface WasmModule {
  readonly HEAPU8: Uint8Array
  _malloc(bytes: number): number
  _free(address: number): void
  readonly tfjs: {
    registerTensor(id: number, size: number, memoryOffset: number): void
    disposeData(id: number): void
  }
}

/** TensorFlow.js on WebAssembly. There is one heap in a process: the kernels of tfjs are bound to one module. */
export class WasmRuntime {
  readonly backend: BackendWasm
  readonly module: WasmModule
  readonly #kernel: (name: string) => KernelFunc
  static #loaded: Promise<WasmRuntime> | undefined

  private constructor(backend: BackendWasm, kernel: (name: string) => KernelFunc) {
    this.backend = backend
    this.module = backend.wasm as unknown as WasmModule
    this.#kernel = kernel
    refuseFullHeap(this.module)
  }

  /** @throws RankwiseError `TFJS_ENGINE` when WebAssembly or the packages of tfjs do not load */
  static load(): Promise<WasmRuntime> {
    WasmRuntime.#loaded ??= WasmRuntime.#create().catch((cause: unknown) => {
      WasmRuntime.#loaded = undefined
      throw new RankwiseError('TFJS_ENGINE', 'TensorFlow.js does not load on WebAssembly', { cause })
    })
    return WasmRuntime.#loaded
  }

  static async #create(): Promise<WasmRuntime> {
    const core = await import('@tensorflow/tfjs-core')
    await import('@tensorflow/tfjs-backend-wasm')
    // Not by setBackend: which backend is current is for the user of tfjs to say.
    const backend = (await core.findBackendFactory('wasm')()) as BackendWasm
    for (const { setupFunc } of core.getKernelsForBackend('wasm')) setupFunc?.(backend)
    const kernels = new Map(
      core.getKernelsForBackend('wasm').map(({ kernelName, kernelFunc }) => [kernelName, kernelFunc]),
    )
    return new WasmRuntime(backend, (name) => {
      const kernel = kernels.get(name)
      if (kernel === undefined) throw new RankwiseError('TFJS_ENGINE', `tfjs has no wasm kernel '${name}'`)
      return kernel
    })
  }

  /** Runs a kernel that has one result. */
  run(name: string, inputs: NamedTensorInfoMap, attrs: NamedAttrMap = {}): TensorInfo {
    return this.#kernel(name)({ inputs, attrs, backend: this.backend }) as TensorInfo
  }

  /** A float32 tensor whose elements are not set. */
  allocate(shape: readonly number[]): TensorInfo {
    return this.backend.makeOutput([...shape], 'float32')
  }

  /** The bits of a float32 tensor where they lie, until something is allocated. */
  wordsOf({ dataId, shape }: TensorInfo): Uint32Array {
    const { memoryOffset } = this.backend.dataIdMap.get(dataId)
    const length = shape.reduce((size, dim) => size * dim, 1)
    // Addresses are signed numbers of 32 bits.
    return new Uint32Array(this.module.HEAPU8.buffer, memoryOffset >>> 0, length)
  }

  /**
   * Frees what kernels keep for a tensor beside its elements: XNNPACK keeps a packed copy of every right-hand side of a
   * product, which would double the memory of all weights.
   */
  dropPacked({ dataId, shape }: TensorInfo): void {
    const { id, memoryOffset } = this.backend.dataIdMap.get(dataId)
    this.module.tfjs.disposeData(id)
    this.module.tfjs.registerTensor(
      id,
      shape.reduce((size, dim) => size * dim, 1),
      memoryOffset,
    )
  }
}

/**
 * Where there is no memory left, `malloc` gives address 0, or the last time one that ends behind the heap; tfjs goes on with
 * either and writes over what lies there.
 */
function refuseFullHeap(module: WasmModule): void {
  // The first call puts the real function in the place of itself.
  module._free(module._malloc(1))
  const malloc = module._malloc
  module._malloc = (bytes) => {
    // A signed 32-bit number.
    const address = malloc(bytes)
    if (address !== 0 && (address >>> 0) + bytes <= module.HEAPU8.length) return address
    if (address !== 0) module._free(address)
    throw new RankwiseError('BACKEND_MEMORY', 'the heap of WebAssembly is full', {
      actual: { bytes, heapBytes: HEAP_BYTES },
      rule: 'weights and activations of all backends of a process fit into one heap of 4 GiB',
      remedy: 'choose a higher tensor-parallel degree, or the native engine',
    })
  }
}

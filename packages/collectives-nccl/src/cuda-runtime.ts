import { RankwiseError } from '@rankwise/core'
import { CUDART, type LibraryPaths, loadLibrary } from './library.ts'
import { runOnThread } from './native-thread.ts'

/** Arguments of the functions that are called, by koffi's names; all but the two that name errors return an error number. */
export const CUDA_PROTOTYPES = {
  cudaRuntimeGetVersion: ['void *'],
  cudaDriverGetVersion: ['void *'],
  cudaGetDeviceCount: ['void *'],
  cudaSetDevice: ['int'],
  cudaDeviceGetPCIBusId: ['void *', 'int', 'int'],
  cudaMalloc: ['void *', 'size_t'],
  cudaFree: ['void *'],
  cudaHostAlloc: ['void *', 'size_t', 'unsigned int'],
  cudaFreeHost: ['void *'],
  cudaMemcpyAsync: ['void *', 'void *', 'size_t', 'int', 'void *'],
  cudaStreamCreateWithFlags: ['void *', 'unsigned int'],
  cudaStreamDestroy: ['void *'],
  cudaStreamWaitEvent: ['void *', 'void *', 'unsigned int'],
  cudaEventCreateWithFlags: ['void *', 'unsigned int'],
  cudaEventDestroy: ['void *'],
  cudaEventRecord: ['void *', 'void *'],
  cudaEventQuery: ['void *'],
  cudaGetLastError: [],
  cudaGetErrorName: ['int'],
  cudaGetErrorString: ['int'],
} as const satisfies Record<string, readonly string[]>

type FunctionName = keyof typeof CUDA_PROTOTYPES
/** An address in this process or on the device; 0n is the null pointer, and the default stream. */
export type Address = bigint
type Argument = number | Address | BigUint64Array | Int32Array | Uint8Array | null

/** Pinned memory of this process, which the GPU reads and writes by itself. */
export interface PinnedMemory {
  readonly address: Address
  /** Must not be touched once the memory is freed. */
  readonly bytes: Uint8Array
}

/** The oldest runtime that these prototypes were compared with. */
const MIN_RUNTIME = 12_000
const PCI_BUS_ID_BYTES = 32
// Numbers of driver_types.h and cuda_runtime_api.h.
const NOT_READY = 600
const STREAM_NON_BLOCKING = 1
const EVENT_DISABLE_TIMING = 2
const HOST_TO_DEVICE = 1
const DEVICE_TO_HOST = 2

/**
 * The part of libcudart that the collectives need. Every failed call is a `CUDA_ERROR` with the name and the text that
 * CUDA has for it.
 */
export class CudaRuntime {
  /** The file or name that it was loaded from. */
  readonly from: string
  readonly #functions: Readonly<Record<string, (...args: Argument[]) => unknown>>
  readonly #view: (address: Address, bytes: number) => ArrayBuffer
  readonly #setDeviceAddress: Address

  private constructor(
    from: string,
    functions: Readonly<Record<string, (...args: Argument[]) => unknown>>,
    view: (address: Address, bytes: number) => ArrayBuffer,
    setDeviceAddress: Address,
  ) {
    this.from = from
    this.#functions = functions
    this.#view = view
    this.#setDeviceAddress = setDeviceAddress
  }

  /** @throws RankwiseError `NCCL_LIBRARY`, `NCCL_VERSION` */
  static async load(paths: LibraryPaths, env?: NodeJS.ProcessEnv): Promise<CudaRuntime> {
    const { handle, from } = await loadLibrary(CUDART, paths, env)
    const { default: koffi } = await import('koffi')
    const functions = Object.fromEntries(
      Object.entries(CUDA_PROTOTYPES).map(([name, types]) => {
        const returns = name.startsWith('cudaGetErrorName') || name.startsWith('cudaGetErrorString') ? 'str' : 'int'
        return [name, handle.func(name, returns, [...types])]
      }),
    )
    const runtime = new CudaRuntime(from, functions, koffi.view, handle.symbol('cudaSetDevice'))
    const version = runtime.runtimeVersion()
    if (version >= MIN_RUNTIME) return runtime
    throw new RankwiseError('NCCL_VERSION', 'the CUDA runtime is too old', {
      where: from,
      actual: { version: cudaVersionText(version) },
      rule: `CUDA ${cudaVersionText(MIN_RUNTIME)} or later`,
      remedy: CUDART.install,
    })
  }

  /** As `CUDART_VERSION`: 13020 is 13.2. */
  runtimeVersion(): number {
    return this.#integer('cudaRuntimeGetVersion')
  }

  /** The newest CUDA that the installed driver supports; 0 without a driver. */
  driverVersion(): number {
    return this.#integer('cudaDriverGetVersion')
  }

  /** @throws RankwiseError `CUDA_UNAVAILABLE` with the words of CUDA when no GPU can be used */
  deviceCount(): number {
    const count = new Int32Array(1)
    const error = this.#call('cudaGetDeviceCount', count)
    if (error === 0) return count[0] as number
    throw new RankwiseError('CUDA_UNAVAILABLE', 'no GPU can be used', {
      where: 'cudaGetDeviceCount',
      actual: {
        error: this.#describe(error),
        runtime: cudaVersionText(this.runtimeVersion()),
        driver: this.driverVersion() === 0 ? 'none' : cudaVersionText(this.driverVersion()),
      },
      rule: 'an NVIDIA GPU, and a driver that supports the version of the CUDA runtime',
      remedy:
        'install or update the NVIDIA driver, check `nvidia-smi`, and in a container pass the GPUs (`--gpus all`)',
    })
  }

  /** Makes a device the current one of another thread, which starts CUDA on it: seconds, the first time. */
  async warmUp(device: number): Promise<void> {
    // The argument is an int; passed as a pointer, its low half is what the function reads.
    const error = await runOnThread(this.#setDeviceAddress, BigInt(device))
    if (error !== 0) throw this.#error('cudaSetDevice', error as number)
  }

  setDevice(device: number): void {
    this.#check('cudaSetDevice', device)
  }

  /** As `0000:17:00.0`. */
  pciBusId(device: number): string {
    const text = new Uint8Array(PCI_BUS_ID_BYTES)
    this.#check('cudaDeviceGetPCIBusId', text, text.length, device)
    return new TextDecoder().decode(text.subarray(0, text.indexOf(0))).toLowerCase()
  }

  allocate(bytes: number): Address {
    return this.#address('cudaMalloc', bytes)
  }

  free(address: Address): void {
    this.#check('cudaFree', address)
  }

  allocatePinned(bytes: number): PinnedMemory {
    const address = this.#address('cudaHostAlloc', bytes, 0)
    return { address, bytes: new Uint8Array(this.#view(address, bytes)) }
  }

  freePinned({ address }: PinnedMemory): void {
    this.#check('cudaFreeHost', address)
  }

  copyToDevice(target: Address, source: Address, bytes: number, stream: Address): void {
    this.#check('cudaMemcpyAsync', target, source, bytes, HOST_TO_DEVICE, stream)
  }

  copyToHost(target: Address, source: Address, bytes: number, stream: Address): void {
    this.#check('cudaMemcpyAsync', target, source, bytes, DEVICE_TO_HOST, stream)
  }

  createStream(): Address {
    return this.#address('cudaStreamCreateWithFlags', STREAM_NON_BLOCKING)
  }

  destroyStream(stream: Address): void {
    this.#check('cudaStreamDestroy', stream)
  }

  /** What is put into `stream` from now on runs after `event`. */
  waitForEvent(stream: Address, event: Address): void {
    this.#check('cudaStreamWaitEvent', stream, event, 0)
  }

  createEvent(): Address {
    return this.#address('cudaEventCreateWithFlags', EVENT_DISABLE_TIMING)
  }

  destroyEvent(event: Address): void {
    this.#check('cudaEventDestroy', event)
  }

  /** The event happens when `stream` has done what is in it now. */
  recordEvent(event: Address, stream: Address): void {
    this.#check('cudaEventRecord', event, stream)
  }

  hasHappened(event: Address): boolean {
    const error = this.#call('cudaEventQuery', event)
    if (error === 0) return true
    if (error !== NOT_READY) throw this.#error('cudaEventQuery', error)
    // CUDA keeps "not ready" as the last error of this thread, where other code would take it for its own.
    this.#call('cudaGetLastError')
    return false
  }

  #call(name: FunctionName, ...args: Argument[]): number {
    return (this.#functions[name] as (...args: Argument[]) => number)(...args)
  }

  #check(name: FunctionName, ...args: Argument[]): void {
    const error = this.#call(name, ...args)
    if (error !== 0) throw this.#error(name, error)
  }

  #integer(name: FunctionName): number {
    const result = new Int32Array(1)
    this.#check(name, result)
    return result[0] as number
  }

  #address(name: FunctionName, ...args: Argument[]): Address {
    const result = new BigUint64Array(1)
    this.#check(name, result, ...args)
    return result[0] as Address
  }

  #describe(error: number): string {
    const { cudaGetErrorName, cudaGetErrorString } = this.#functions
    return `${cudaGetErrorName?.(error)} (${error}): ${cudaGetErrorString?.(error)}`
  }

  #error(name: FunctionName, error: number): RankwiseError {
    return new RankwiseError('CUDA_ERROR', `${name} failed`, { actual: { error: this.#describe(error) } })
  }
}

/** `13020` as `13.2` */
function cudaVersionText(version: number): string {
  return `${Math.floor(version / 1000)}.${Math.floor((version % 1000) / 10)}`
}

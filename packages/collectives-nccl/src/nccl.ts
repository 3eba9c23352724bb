import { type DType, RankwiseError, type ReduceOp } from '@rankwise/core'
import type { Address } from './cuda-runtime.ts'
import { type LibraryPaths, loadLibrary, NCCL } from './library.ts'
import { runOnThread } from './native-thread.ts'
import { nonBlockingConfig } from './nccl-config.ts'
import { BYTE_TYPE, dataType, NCCL_IN_PROGRESS, NCCL_SUCCESS, reduction, WORD_TYPE } from './nccl-types.ts'

/** Stands for `ncclUniqueId` among the arguments: 128 bytes by value. */
export const UNIQUE_ID = 'ncclUniqueId'
const UNIQUE_ID_BYTES = 128

/** Arguments of the functions that are called, by koffi's names; all but the two that name errors return `ncclResult_t`. */
export const NCCL_PROTOTYPES = {
  ncclGetVersion: ['void *'],
  ncclGetUniqueId: ['void *'],
  ncclCommInitRankConfig: ['void *', 'int', UNIQUE_ID, 'int', 'void *'],
  ncclCommFinalize: ['void *'],
  ncclCommGetAsyncError: ['void *', 'void *'],
  ncclGroupStart: [],
  ncclGroupEnd: [],
  ncclAllReduce: ['void *', 'void *', 'size_t', 'int', 'int', 'void *', 'void *'],
  ncclAllGather: ['void *', 'void *', 'size_t', 'int', 'void *', 'void *'],
  ncclReduceScatter: ['void *', 'void *', 'size_t', 'int', 'int', 'void *', 'void *'],
  ncclBroadcast: ['void *', 'void *', 'size_t', 'int', 'int', 'void *', 'void *'],
  ncclGetErrorString: ['int'],
  ncclGetLastError: ['void *'],
} as const satisfies Record<string, readonly string[]>

/** Functions that block until the GPU and NCCL's threads are done; they run on threads of their own. */
export const NCCL_THREADED = ['ncclCommAbort', 'ncclCommDestroy'] as const

type FunctionName = keyof typeof NCCL_PROTOTYPES
type Argument = number | Address | Uint8Array | Int32Array | BigUint64Array | { internal: Uint8Array } | null
type Functions = Readonly<Record<string, (...args: Argument[]) => unknown>>

/** What an operation works on: a run of elements on the device, of any type that NCCL knows. */
export interface Span {
  readonly send: Address
  readonly receive: Address
  /** Elements, as the function counts them. */
  readonly count: number
}

/** A communicator and the stream that its operations go to. */
export interface Channel {
  readonly comm: Address
  readonly stream: Address
}

/** The first NCCL with communicators that do not block, `ncclCommInitRankConfig` and `ncclCommFinalize`. */
const MIN_VERSION = 21_400
/** The first that lets several ranks use one GPU. */
const MULTI_RANK_VERSION = 23_000

/**
 * The part of libnccl that the collectives need. Calls return at once; whether what they started succeeds, only
 * `asyncError` tells.
 */
export class Nccl {
  /** The file or name that it was loaded from. */
  readonly from: string
  /** As `NCCL_VERSION_CODE`: 23007 is 2.30.7. */
  readonly version: number
  readonly #functions: Functions
  readonly #blocking: Readonly<Record<(typeof NCCL_THREADED)[number], Address>>

  private constructor(
    from: string,
    functions: Functions,
    blocking: Readonly<Record<(typeof NCCL_THREADED)[number], Address>>,
  ) {
    this.from = from
    this.#functions = functions
    this.#blocking = blocking
    const version = new Int32Array(1)
    this.#check('ncclGetVersion', version)
    this.version = version[0] as number
  }

  /** @throws RankwiseError `NCCL_LIBRARY`, `NCCL_VERSION` */
  static async load(paths: LibraryPaths, env?: NodeJS.ProcessEnv): Promise<Nccl> {
    const { handle, from } = await loadLibrary(NCCL, paths, env)
    const { default: koffi } = await import('koffi')
    const uniqueId = koffi.struct({ internal: koffi.array('uint8_t', UNIQUE_ID_BYTES, 'Typed') })
    const functions = Object.fromEntries(
      Object.entries(NCCL_PROTOTYPES).map(([name, types]) => {
        const returns = name === 'ncclGetErrorString' || name === 'ncclGetLastError' ? 'str' : 'int'
        return [
          name,
          handle.func(
            name,
            returns,
            types.map((type) => (type === UNIQUE_ID ? uniqueId : type)),
          ),
        ]
      }),
    )
    const [abort, destroy] = NCCL_THREADED
    const nccl = new Nccl(from, functions, { [abort]: handle.symbol(abort), [destroy]: handle.symbol(destroy) })
    if (nccl.version >= MIN_VERSION) return nccl
    throw new RankwiseError('NCCL_VERSION', 'NCCL is too old', {
      where: from,
      actual: { version: ncclVersionText(nccl.version) },
      rule: `NCCL ${ncclVersionText(MIN_VERSION)} or later`,
      remedy: NCCL.install,
    })
  }

  /** Whether several ranks can use one GPU, with `NCCL_MULTI_RANK_GPU_ENABLE=1`. */
  get sharesGpus(): boolean {
    return this.version >= MULTI_RANK_VERSION
  }

  /** What the ranks of one communicator have in common. The process listens for them from here on. */
  createUniqueId(): Uint8Array {
    const id = new Uint8Array(UNIQUE_ID_BYTES)
    this.#check('ncclGetUniqueId', id)
    return id
  }

  /** Starts to join; it is done when `asyncError` no longer says that it is in progress. */
  initRank(worldSize: number, id: Uint8Array, rank: number): Address {
    const comm = new BigUint64Array(1)
    this.#check('ncclCommInitRankConfig', comm, worldSize, { internal: id }, rank, nonBlockingConfig())
    return comm[0] as Address
  }

  /** Starts to flush everything; see {@link initRank}. */
  finalize(comm: Address): void {
    this.#check('ncclCommFinalize', comm)
  }

  /** Frees a communicator that is finalized. Resolves with undefined when that takes longer than `limitMs`. */
  destroy(comm: Address, limitMs: number): Promise<number | undefined> {
    return runOnThread(this.#blocking.ncclCommDestroy, comm, limitMs)
  }

  /** Stops what runs on the device, and frees the communicator; nothing else may use it meanwhile. See {@link destroy}. */
  abort(comm: Address, limitMs: number): Promise<number | undefined> {
    return runOnThread(this.#blocking.ncclCommAbort, comm, limitMs)
  }

  /**
   * Whether everything that was started on the communicator is on the device.
   *
   * @throws RankwiseError `NCCL_ERROR` when NCCL failed in the meantime
   */
  isReady(comm: Address): boolean {
    const state = new Int32Array(1)
    this.#check('ncclCommGetAsyncError', comm, state)
    const result = state[0] as number
    if (result === NCCL_IN_PROGRESS) return false
    if (result !== NCCL_SUCCESS) throw this.#error('asynchronous operation', result)
    return true
  }

  /** Starts all calls that `body` makes as one. */
  group(body: () => void): void {
    this.#check('ncclGroupStart')
    try {
      body()
    } finally {
      this.#check('ncclGroupEnd')
    }
  }

  allReduce({ send, receive, count }: Span, dtype: DType, op: ReduceOp, { comm, stream }: Channel): void {
    this.#check('ncclAllReduce', send, receive, count, dataType(dtype), reduction(op), comm, stream)
  }

  /** `count` is what each rank leaves itself. */
  reduceScatter({ send, receive, count }: Span, dtype: DType, op: ReduceOp, { comm, stream }: Channel): void {
    this.#check('ncclReduceScatter', send, receive, count, dataType(dtype), reduction(op), comm, stream)
  }

  /** `count` bytes of each rank. */
  allGather({ send, receive, count }: Span, { comm, stream }: Channel): void {
    this.#check('ncclAllGather', send, receive, count, BYTE_TYPE, comm, stream)
  }

  /** `count` 32-bit words of each rank. */
  allGatherWords({ send, receive, count }: Span, { comm, stream }: Channel): void {
    this.#check('ncclAllGather', send, receive, count, WORD_TYPE, comm, stream)
  }

  /** `count` bytes. */
  broadcast({ send, receive, count }: Span, source: number, { comm, stream }: Channel): void {
    this.#check('ncclBroadcast', send, receive, count, BYTE_TYPE, source, comm, stream)
  }

  #check(name: FunctionName, ...args: Argument[]): void {
    const result = (this.#functions[name] as (...args: Argument[]) => number)(...args)
    if (result !== NCCL_SUCCESS && result !== NCCL_IN_PROGRESS) throw this.#error(name, result)
  }

  #error(what: string, result: number): RankwiseError {
    const { ncclGetErrorString, ncclGetLastError } = this.#functions
    const last = String(ncclGetLastError?.(null) ?? '')
    return new RankwiseError('NCCL_ERROR', `${what} failed`, {
      actual: {
        result,
        error: String(ncclGetErrorString?.(result)),
        ...(last === '' ? {} : { detail: last }),
      },
      remedy: 'set NCCL_DEBUG=INFO on every rank and look for the first warning',
    })
  }
}

/** `23007` as `2.30.7` */
export function ncclVersionText(version: number): string {
  return `${Math.floor(version / 10_000)}.${Math.floor((version % 10_000) / 100)}.${version % 100}`
}

import { setTimeout } from 'node:timers/promises'
import { type EnvironmentRendezvous, openStore, RankwiseError, type Store, throwIfAborted } from '@rankwise/core'
import { requireKnownOptions } from '@rankwise/core/collectives'
import { ALIGNMENT } from './chunks.ts'
import { Communicator } from './communicator.ts'
import { CudaRuntime } from './cuda-runtime.ts'
import type { LibraryPaths } from './library.ts'
import {
  describeSelf,
  exchangeMembers,
  type Member,
  refuse,
  requireCompatible,
  shareUniqueId,
  waitForCards,
} from './membership.ts'
import { Nccl, ncclVersionText } from './nccl.ts'
import { NcclCollectives } from './nccl-collectives.ts'
import { NoticeBoard } from './notice-board.ts'
import { ScopedStore } from './scoped-store.ts'
import { Watch } from './watch.ts'

/** How a rank joins. `allowSharedGpu`, `checkFirst` and `stagingBytes` are the same on all ranks. */
export interface NcclCollectivesOptions {
  /**
   * Where the ranks find each other, as long as the group lives. One that is given stays open after `destroy`.
   * @default that of the rendezvous, which is closed by `destroy`
   */
  readonly store?: Store
  /** Number of this rank's GPU among those that the process sees. @default localRank, or 0 if it sees only one */
  readonly device?: number
  /**
   * Lets ranks share a GPU, which takes NCCL 2.30: sets `NCCL_MULTI_RANK_GPU_ENABLE=1` in the environment of this
   * process. For tests; a shared GPU is slower than one rank on it. @default whether that is set already
   */
  readonly allowSharedGpu?: boolean
  /**
   * How many operations are compared between the ranks before they run; `COLLECTIVE_MISMATCH` can only be told of
   * those. Ranks at different operations hang until the timeout or get wrong data otherwise. 0 compares barriers only.
   * @default Infinity
   */
  readonly checkFirst?: number
  /**
   * Bytes of a tensor in host memory that travel at a time. The group takes twice as much pinned memory, and twice as
   * much of the GPU. A multiple of 256 from `256 * worldSize` to 2^30. @default 8388608
   */
  readonly stagingBytes?: number
  /** Where libnccl and libcudart lie. @default see `LibraryPaths` */
  readonly libraries?: LibraryPaths
  /** Gives up joining. */
  readonly signal?: AbortSignal
}

const OPTIONS: readonly (keyof NcclCollectivesOptions)[] = [
  'store',
  'device',
  'allowSharedGpu',
  'checkFirst',
  'stagingBytes',
  'libraries',
  'signal',
]

/** Not yet measured on a GPU. Large enough that a copy over PCIe (0.3 ms at 25 GB/s) outlasts starting a kernel. */
const STAGING_BYTES = 2 ** 23
// `koffi.view` aborts the process beyond 4 GiB.
const MAX_STAGING_BYTES = 2 ** 30

/** How long a rank that failed waits for the others to read why. They take milliseconds. */
const FAREWELL_MS = 500
/** How long a rank 0 that failed at once waits for the others to come and read why: they start in a second or two. */
const LATECOMERS_MS = 3_000

interface Settings {
  readonly allowSharedGpu: boolean
  readonly checkFirst: number
  readonly stagingBytes: number
}

/** What a rank needs of this machine. */
interface Prepared {
  readonly settings: Settings
  readonly cuda: CudaRuntime
  readonly nccl: Nccl
  readonly device: number
  readonly self: Member
}

/**
 * Joins ranks that have a GPU each, on one machine or many, over NCCL. Loads libnccl and libcudart at the first call.
 *
 * @throws RankwiseError `COLLECTIVES_OPTIONS`, `NCCL_LIBRARY`, `NCCL_VERSION`, `NCCL_UNSUPPORTED` when a library cannot be used; `CUDA_UNAVAILABLE`,
 * `NCCL_DEVICE`, `NCCL_SHARED_GPU` when there is no GPU for this rank; `NCCL_OPTIONS` when an option is out of range or the
 * ranks differ in one; `RENDEZVOUS_TIMEOUT`, `RANK_LOST`, `COLLECTIVE_TIMEOUT` or `ABORTED` when the ranks do not get
 * together, and those of `openStore`; `NCCL_ERROR` and `CUDA_ERROR` with the words of the libraries
 */
export async function ncclCollectives(
  rendezvous: EnvironmentRendezvous,
  options: NcclCollectivesOptions = {},
): Promise<NcclCollectives> {
  requireKnownOptions('nccl', options, OPTIONS)
  const { store: given, signal } = options
  throwIfAborted(signal, 'ncclCollectives')
  if (given !== undefined) return join(rendezvous, options, given)
  const store = await openStore(rendezvous, { signal })
  try {
    return await join(rendezvous, options, store, () => store.close())
  } catch (error) {
    // The others still read what went wrong; one that is stopped does not hold this rank up for long.
    await Promise.race([store.close(), setTimeout(FAREWELL_MS, undefined, { ref: false })])
    throw error
  }
}

/** @param release what is left to do when the group is destroyed, if the store belongs to it */
async function join(
  rendezvous: EnvironmentRendezvous,
  options: NcclCollectivesOptions,
  base: Store,
  release?: () => Promise<void>,
): Promise<NcclCollectives> {
  const { rank, worldSize, timeoutMs } = rendezvous
  const { signal } = options
  const store = await ScopedStore.open(base, rank)
  const holdsStore = rank === 0 && release !== undefined
  const { settings, cuda, nccl, device, self } = await prepareTogether(store, rendezvous, options, holdsStore)

  const deadline = AbortSignal.timeout(timeoutMs)
  const ended = signal === undefined ? deadline : AbortSignal.any([deadline, signal])
  const members = await abortable(signal, exchangeMembers(store, self, worldSize, ended))
  requireCompatible(members, nccl.sharesGpus)
  // Read by NCCL when it starts.
  if (settings.allowSharedGpu) process.env.NCCL_MULTI_RANK_GPU_ENABLE = '1'
  const uniqueId = await abortable(
    signal,
    shareUniqueId(store, rank, () => nccl.createUniqueId(), ended),
  )

  const watch = new Watch({ board: new NoticeBoard(store, rank), members, rank, timeoutMs })
  const turn = watch.begin({ sequence: 0, name: 'ncclCommInitRankConfig', describe: () => 'joining the group', signal })
  return watch.run(turn, async () => {
    const communicator = await Communicator.join(cuda, nccl, watch, turn, { device, rank, worldSize, uniqueId })
    try {
      return new NcclCollectives({ communicator, watch, rank, worldSize, release, ...settings })
    } catch (error) {
      // The error that brought us here counts, not one of cleaning up.
      await communicator.abort().catch(() => {})
      throw error
    }
  })
}

/** Everything that can go wrong on this rank alone. */
async function prepare(
  { rank, localRank, worldSize }: EnvironmentRendezvous,
  options: NcclCollectivesOptions,
): Promise<Prepared> {
  const settings = requireSettings(options, worldSize)
  const { libraries = {} } = options
  const [cuda, nccl] = await Promise.all([CudaRuntime.load(libraries), Nccl.load(libraries)])
  const device = chooseDevice(cuda.deviceCount(), localRank, options.device)
  const self = describeSelf(rank, cuda.pciBusId(device), {
    ...settings,
    checkFirst: String(settings.checkFirst),
    ncclVersion: ncclVersionText(nccl.version),
  })
  return { settings, cuda, nccl, device, self }
}

/** @param holdsStore whether the others lose the store when this rank gives up */
async function prepareTogether(
  store: ScopedStore,
  rendezvous: EnvironmentRendezvous,
  options: NcclCollectivesOptions,
  holdsStore: boolean,
): Promise<Prepared> {
  try {
    return await prepare(rendezvous, options)
  } catch (error) {
    // If the store cannot be reached either, the others learn that from the store.
    await refuse(store, rendezvous.rank, error).catch(() => {})
    if (holdsStore) await waitForCards(store, rendezvous.worldSize, AbortSignal.timeout(LATECOMERS_MS))
    throw error
  }
}

/** What a store throws for an aborted wait is its own affair; an abort of the user is always told in the same way. */
async function abortable<T>(signal: AbortSignal | undefined, wait: Promise<T>): Promise<T> {
  try {
    return await wait
  } catch (error) {
    throwIfAborted(signal, 'ncclCollectives')
    throw error
  }
}

function chooseDevice(count: number, localRank: number, chosen: number | undefined): number {
  const device = chosen ?? (count === 1 ? 0 : localRank)
  if (Number.isInteger(device) && device >= 0 && device < count) return device
  throw new RankwiseError('NCCL_DEVICE', 'there is no GPU of this number', {
    actual: { device, visibleGpus: count, localRank },
    rule: 'device is an integer from 0 to the number of visible GPUs - 1',
    remedy: 'start as many ranks on this machine as it has GPUs, and check CUDA_VISIBLE_DEVICES',
  })
}

function requireSettings(
  {
    allowSharedGpu = process.env.NCCL_MULTI_RANK_GPU_ENABLE === '1',
    checkFirst = Number.POSITIVE_INFINITY,
    stagingBytes = STAGING_BYTES,
  }: NcclCollectivesOptions,
  worldSize: number,
): Settings {
  const least = ALIGNMENT * worldSize
  if (!(stagingBytes >= least && stagingBytes % ALIGNMENT === 0 && stagingBytes <= MAX_STAGING_BYTES)) {
    throw new RankwiseError('NCCL_OPTIONS', 'stagingBytes is out of range', {
      actual: { stagingBytes, worldSize },
      rule: `stagingBytes is a multiple of ${ALIGNMENT} from ${ALIGNMENT} * worldSize (${least}) to ${MAX_STAGING_BYTES}`,
    })
  }
  if (!(checkFirst >= 0 && (Number.isInteger(checkFirst) || checkFirst === Number.POSITIVE_INFINITY))) {
    throw new RankwiseError('NCCL_OPTIONS', 'checkFirst is out of range', {
      actual: { checkFirst },
      rule: 'checkFirst is an integer from 0 up, or Infinity',
    })
  }
  return { allowSharedGpu, checkFirst, stagingBytes }
}

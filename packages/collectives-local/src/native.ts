import { getSystemErrorName } from 'node:util'
import { RankwiseError } from '@rankwise/core'
import type { KoffiFunc } from 'koffi'

/** How long one sleep in the kernel lasts at most, so that a waiting rank looks up this often. */
const SLEEP_MS = 25

/** What Node itself does not offer of Linux: memory that processes share, and sleeping on a word of it. */
export interface Native {
  /** Creates empty shared memory without a name in the file system; returns its file descriptor. */
  createMemory(): number
  /** Maps a file descriptor for reading and writing; returns the address. */
  map(descriptor: number, bytes: number): bigint
  unmap(address: bigint, bytes: number): void
  /** Makes the kernel set aside all of the memory behind a file descriptor. */
  reserve(descriptor: number, bytes: number): void
  /** Puts private memory of zeros where shared memory was mapped. */
  replace(address: bigint, bytes: number): void
  /** The mapped memory as an ArrayBuffer; must not be touched after `unmap`. */
  view(address: bigint, bytes: number): ArrayBuffer
  /**
   * Checks that a process may sleep on memory: a sandbox may forbid it.
   *
   * @throws RankwiseError `SHARED_MEMORY`
   */
  requireSleep(address: bigint): void
  /** Sleeps on another thread while the word at `address` is `expected`, for {@link SLEEP_MS} at most. */
  sleep(address: bigint, expected: number): Promise<void>
  /** Wakes every process that sleeps on the word at `address`. */
  wake(address: bigint): void
}

const FUTEX_CALL: Partial<Record<NodeJS.Architecture, number>> = { x64: 202, arm64: 98 }
const FUTEX_WAIT = 0
const FUTEX_WAKE = 1
const MFD_CLOEXEC = 1
const PROT_READ_WRITE = 3
const MAP_SHARED = 1
const MAP_PRIVATE = 2
const MAP_FIXED = 0x10
const MAP_ANONYMOUS = 0x20
const MAP_NORESERVE = 0x4000
/** Touching a page for the first time takes 12 us on a virtual machine: all pages are mapped at once instead. */
const MAP_POPULATE = 0x8000
/** Error number of an interrupted call. It is made again, but not for ever. */
const EINTR = 4
/** Error number of a sleep on a word that has another value than expected. */
const EAGAIN = 11
const MAX_INTERRUPTIONS = 100
const MAP_FAILED = 2n ** 64n - 1n
const ALL = 2 ** 31 - 1

type Pointer = bigint | BigInt64Array | null
type Futex = (call: number, word: bigint, operation: number, value: number, timeout: Pointer) => number

/**
 * Binds the system calls.
 *
 * @throws RankwiseError `TRANSPORT_UNSUPPORTED` on anything but Linux on x64 or arm64, and where koffi does not load
 */
export async function loadNative(): Promise<Native> {
  const futexCall = FUTEX_CALL[process.arch]
  if (process.platform !== 'linux' || futexCall === undefined) throw unsupportedPlatform()

  const koffi = await loadKoffi()
  const libc = koffi.load(null)
  const memfdCreate = libc.func('int memfd_create(const char *name, unsigned int flags)')
  const mmap = libc.func('void *mmap(void *address, size_t length, int prot, int flags, int fd, int64_t offset)')
  const munmap = libc.func('int munmap(void *address, size_t length)')
  const fallocate = libc.func('int posix_fallocate(int fd, int64_t offset, int64_t length)')
  // glibc has no futex(); the four trailing arguments of the call are integers, so syscall() needs no variadic form.
  const futex = libc.func(
    'long syscall(long call, void *word, int operation, uint32_t value, void *timeout)',
  ) as unknown as KoffiFunc<Futex>
  const sleepTime = new BigInt64Array([0n, BigInt(SLEEP_MS) * 1_000_000n])

  const check = (call: string, failed: boolean) => {
    if (failed) throw callFailed(call, koffi.errno())
  }

  return {
    createMemory() {
      const descriptor: number = memfdCreate('rankwise', MFD_CLOEXEC)
      check('memfd_create', descriptor < 0)
      return descriptor
    },
    map(descriptor, bytes) {
      const address: bigint = mmap(null, bytes, PROT_READ_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0)
      check('mmap', address === MAP_FAILED)
      return address
    },
    unmap(address, bytes) {
      check('munmap', munmap(address, bytes) !== 0)
    },
    reserve(descriptor, bytes) {
      let errno: number = EINTR
      for (let i = 0; i < MAX_INTERRUPTIONS && errno === EINTR; i++) errno = fallocate(descriptor, 0, bytes)
      if (errno !== 0) throw callFailed('posix_fallocate', errno)
    },
    replace(address, bytes) {
      const flags = MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE
      check('mmap', mmap(address, bytes, PROT_READ_WRITE, flags, -1, 0) === MAP_FAILED)
    },
    view: (address, bytes) => koffi.view(address, bytes),
    requireSleep(address) {
      const [word = 0] = new Uint32Array(koffi.view(address, 4))
      const status = futex(futexCall, address, FUTEX_WAIT, (word + 1) >>> 0, sleepTime)
      if (status < 0 && koffi.errno() !== EAGAIN) throw callFailed('futex', koffi.errno())
    },
    sleep: (address, expected) =>
      new Promise((resolve, reject) => {
        // Whether the sleep ended by a wake, by a changed word or by time makes no difference: the caller looks again.
        futex.async(futexCall, address, FUTEX_WAIT, expected >>> 0, sleepTime, (error: unknown) =>
          error === null ? resolve() : reject(error),
        )
      }),
    wake(address) {
      futex(futexCall, address, FUTEX_WAKE, ALL, null)
    },
  }
}

async function loadKoffi() {
  try {
    return (await import('koffi')).default
  } catch (cause) {
    throw new RankwiseError('TRANSPORT_UNSUPPORTED', 'koffi, which calls the system, does not load', {
      actual: { platform: process.platform, arch: process.arch, reason: (cause as Error).message.split('\n', 1)[0] },
      rule: 'ranks that share memory need the optional native part of koffi',
      remedy: "install the package again on this system, or choose transport 'tcp'",
      cause,
    })
  }
}

function callFailed(call: string, errno: number): RankwiseError {
  return new RankwiseError('SHARED_MEMORY', `${call} failed`, {
    actual: { errno: getSystemErrorName(-errno) },
    remedy: 'check the memory and file descriptor limits of this process (ulimit, cgroup)',
  })
}

function unsupportedPlatform(): RankwiseError {
  return new RankwiseError('TRANSPORT_UNSUPPORTED', 'shared memory between ranks does not work on this platform', {
    actual: { platform: process.platform, arch: process.arch },
    rule: "transport 'shm' needs Linux on x64 or arm64",
    remedy: "choose transport 'tcp' or 'auto'",
  })
}

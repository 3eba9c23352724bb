import { getSystemErrorName } from 'node:util'
import { mappingError } from './mapping-error.ts'

const PLATFORMS: readonly NodeJS.Platform[] = ['linux', 'darwin']
const PROT_READ = 1
const MAP_PRIVATE = 2
const MAP_FAILED = 2n ** 64n - 1n

/** The calls of the C library that map files. */
export interface NativeMemory {
  readonly pageBytes: number
  /**
   * Maps bytes of an open file for reading.
   *
   * @param offset - a multiple of `pageBytes`
   * @returns the address, or the name of the error
   */
  map(descriptor: number, offset: number, bytes: number): bigint | string
  unmap(address: bigint, bytes: number): void
  /** The memory as an ArrayBuffer, of 4 GiB at most; touching it after `unmap` crashes the process. */
  view(address: bigint, bytes: number): ArrayBuffer
}

/**
 * Binds the calls.
 *
 * @param platform - @default that of this process
 * @throws RankwiseError `BACKEND_MAPPING` where there are none, or koffi does not load
 */
export async function loadNativeMemory(platform: NodeJS.Platform = process.platform): Promise<NativeMemory> {
  if (!PLATFORMS.includes(platform)) throw mappingError(platform, `files are mapped on ${PLATFORMS.join(' and ')} only`)
  try {
    const { default: koffi } = await import('koffi')
    const libc = koffi.load(null)
    const mmap = libc.func('void *mmap(void *address, size_t length, int prot, int flags, int fd, int64_t offset)')
    const munmap = libc.func('int munmap(void *address, size_t length)')
    const getpagesize = libc.func('int getpagesize()')
    return {
      pageBytes: getpagesize(),
      map(descriptor, offset, bytes) {
        const address: bigint = mmap(null, bytes, PROT_READ, MAP_PRIVATE, descriptor, offset)
        return address === MAP_FAILED ? getSystemErrorName(-koffi.errno()) : address
      },
      unmap: (address, bytes) => munmap(address, bytes),
      view: (address, bytes) => koffi.view(address, bytes),
    }
  } catch (cause) {
    throw mappingError('koffi', 'the native module that calls mmap does not load', cause)
  }
}

import { type Environment, RankwiseError } from '@rankwise/core'
import koffi, { type LibraryHandle } from 'koffi'

/** The two binary interfaces in use: handles are pointers to objects of the library, or integers of mpi.h. */
export type MpiFamily = 'OpenMPI' | 'MPICH'

/** A loaded MPI library. */
export interface MpiLibrary {
  readonly handle: LibraryHandle
  readonly path: string
  readonly family: MpiFamily
  /** First line of what the library says of itself, such as `MPICH Version: 4.0.2`. */
  readonly version: string
}

/** Sonames of OpenMPI 1.10 to 5. */
const OPENMPI_NAMES = ['libmpi.so.40', 'libmpi.so.20', 'libmpi.so.12']
/** Debian's name of MPICH 3.1 to 4, and upstream's, which the common MPICH ABI prescribes. */
const MPICH_NAMES = ['libmpich.so.12', 'libmpi.so.12']

const VERSION_BYTES = 8192

/**
 * Loads the MPI library of this machine: the one that `RANKWISE_MPI_LIBRARY` names, or OpenMPI under its `mpirun`, or
 * MPICH, which needs no launcher of its own.
 *
 * @throws RankwiseError `MPI_NOT_FOUND`, `MPI_UNSUPPORTED`
 */
export function loadMpiLibrary(env: Environment = process.env): MpiLibrary {
  const underOpenMpi = startedByOpenMpi(env)
  const named = env.RANKWISE_MPI_LIBRARY
  const family = underOpenMpi ? OPENMPI_NAMES : MPICH_NAMES
  const failures: string[] = []
  for (const path of named === undefined ? family : [named]) {
    const library = tryLoad(path, failures)
    if (library === undefined) continue
    if (library.family === 'OpenMPI' && !underOpenMpi) throw needsMpirun(library)
    if (library.family === 'MPICH' && underOpenMpi) throw wrongLauncher(library)
    return library
  }
  throw notFound(failures, underOpenMpi)
}

/** Whether `mpirun` of OpenMPI started this process. */
export function startedByOpenMpi(env: Environment = process.env): boolean {
  return env.OMPI_COMM_WORLD_SIZE !== undefined
}

function tryLoad(path: string, failures: string[]): MpiLibrary | undefined {
  let handle: LibraryHandle
  try {
    // OpenMPI's plug-ins look for symbols of the library among the global ones.
    handle = koffi.load(path, { global: true })
  } catch (error) {
    failures.push(`${path}: ${error instanceof Error ? error.message : String(error)}`)
    return undefined
  }
  const text = versionText(handle, path)
  return { handle, path, family: familyOf(text, path), version: text.split('\n')[0]?.replace(/\s+/g, ' ') as string }
}

function versionText(handle: LibraryHandle, path: string): string {
  const text = new Uint8Array(VERSION_BYTES)
  const length = new Int32Array(1)
  try {
    handle.func('int MPI_Get_library_version(void *version, void *length)')(text, length)
  } catch (cause) {
    throw unsupported(path, 'it has no MPI_Get_library_version', cause)
  }
  return new TextDecoder().decode(text.subarray(0, length[0])).replace(/\0.*$/s, '')
}

function familyOf(version: string, path: string): MpiFamily {
  if (version.startsWith('Open MPI')) return 'OpenMPI'
  // MVAPICH and Intel MPI keep the binary interface of MPICH.
  if (/^(MPICH|MVAPICH|Intel\(R\) MPI)/.test(version)) return 'MPICH'
  throw unsupported(path, `it calls itself ${JSON.stringify(version.slice(0, 100))}`)
}

function unsupported(path: string, why: string, cause?: unknown): RankwiseError {
  return new RankwiseError('MPI_UNSUPPORTED', `the library is none that Rankwise knows: ${why}`, {
    where: path,
    rule: 'the library is OpenMPI, or has the binary interface of MPICH',
    remedy: 'name another with RANKWISE_MPI_LIBRARY',
    cause,
  })
}

function needsMpirun({ path, version }: MpiLibrary): RankwiseError {
  return new RankwiseError('MPI_UNSUPPORTED', 'OpenMPI cannot join processes that its mpirun did not start', {
    where: path,
    actual: { version },
    rule: 'ranks on OpenMPI are started by its mpirun',
    remedy:
      'start the ranks with mpirun, or install MPICH (Debian: apt-get install libmpich12), which any launcher suits',
  })
}

function wrongLauncher({ path, version }: MpiLibrary): RankwiseError {
  return new RankwiseError(
    'MPI_UNSUPPORTED',
    'the ranks were started by mpirun of OpenMPI, which this library is not',
    {
      where: path,
      actual: { version },
      remedy: 'unset RANKWISE_MPI_LIBRARY, or start the ranks with `rankwise run`',
    },
  )
}

function notFound(failures: readonly string[], underOpenMpi: boolean): RankwiseError {
  const packages = underOpenMpi
    ? 'OpenMPI (Debian: apt-get install openmpi-bin)'
    : 'MPICH (Debian: apt-get install libmpich12)'
  return new RankwiseError('MPI_NOT_FOUND', 'no MPI library can be loaded', {
    actual: { tried: failures },
    rule: 'ranks on several machines need MPI on each of them',
    remedy: `install ${packages}, or name the library with RANKWISE_MPI_LIBRARY`,
  })
}

import { existsSync } from 'node:fs'
import { join } from 'node:path'
import { RankwiseError } from '@rankwise/core'
import type { LibraryHandle } from 'koffi'

/** Where the libraries of NVIDIA are looked for. */
export interface LibraryPaths {
  /** File of NCCL. @default RANKWISE_NCCL_LIBRARY */
  readonly nccl?: string | undefined
  /** File of the CUDA runtime. @default RANKWISE_CUDART_LIBRARY */
  readonly cudart?: string | undefined
  /**
   * A `site-packages` folder of Python, with the packages `nvidia-nccl-cu13` and `nvidia-cuda-runtime` (or those of CUDA
   * 12) in it. @default RANKWISE_NVIDIA_SITE
   */
  readonly site?: string | undefined
}

/** A library of NVIDIA, and how to get it. */
export interface LibraryKind {
  readonly title: string
  readonly option: 'nccl' | 'cudart'
  readonly variable: string
  /** Names that the dynamic linker knows, best first. */
  readonly names: readonly string[]
  /** Files below `site-packages`, best first. */
  readonly siteFiles: readonly string[]
  readonly install: string
}

export const NCCL: LibraryKind = {
  title: 'NCCL',
  option: 'nccl',
  variable: 'RANKWISE_NCCL_LIBRARY',
  names: ['libnccl.so.2'],
  siteFiles: ['nvidia/nccl/lib/libnccl.so.2'],
  install: "install NVIDIA's package libnccl2, or `pip install nvidia-nccl-cu13`",
}

export const CUDART: LibraryKind = {
  title: 'the CUDA runtime',
  option: 'cudart',
  variable: 'RANKWISE_CUDART_LIBRARY',
  names: ['libcudart.so.13', 'libcudart.so.12'],
  siteFiles: ['nvidia/cu13/lib/libcudart.so.13', 'nvidia/cuda_runtime/lib/libcudart.so.12'],
  install: "install NVIDIA's package cuda-cudart-13-0, or `pip install nvidia-cuda-runtime`",
}

// dlfcn.h of Linux
const RTLD_NOW = 2
const RTLD_NODELETE = 0x1000

/** A library that is loaded, and the name or file under which it was found. */
export interface LoadedLibrary {
  readonly handle: LibraryHandle
  readonly from: string
}

/**
 * Loads a library. A file or folder that is named is the only place that is looked at: an explicit choice never falls back.
 *
 * @throws RankwiseError `NCCL_UNSUPPORTED` on anything but Linux, `NCCL_LIBRARY` with what the dynamic linker said of every
 * place
 */
export async function loadLibrary(
  kind: LibraryKind,
  paths: LibraryPaths,
  env: NodeJS.ProcessEnv = process.env,
): Promise<LoadedLibrary> {
  requireLinux()
  const { default: koffi } = await import('koffi')
  const dlopen = koffi.load(null).func('dlopen', 'void *', ['str', 'int'])
  const reasons: string[] = []
  for (const name of candidates(kind, paths, env)) {
    try {
      const handle = koffi.load(name)
      // koffi unloads at the end of the process, under the feet of threads that NCCL may still run: that is a crash.
      dlopen(name, RTLD_NOW | RTLD_NODELETE)
      return { handle, from: name }
    } catch (error) {
      // koffi puts the name before what dlerror says, which starts with it too.
      reasons.push(`${name}: ${(error as Error).message.replace(/^Failed to load shared library: /, '')}`)
    }
  }
  throw new RankwiseError('NCCL_LIBRARY', `${kind.title} cannot be loaded`, {
    actual: { tried: reasons },
    rule: `the file is named by ${kind.variable}, or lies in RANKWISE_NVIDIA_SITE, or the dynamic linker finds it`,
    remedy: `${kind.install} and set RANKWISE_NVIDIA_SITE to its site-packages folder`,
  })
}

function candidates(kind: LibraryKind, paths: LibraryPaths, env: NodeJS.ProcessEnv): readonly string[] {
  const file = paths[kind.option] ?? env[kind.variable]
  if (file !== undefined) return [file]
  const site = paths.site ?? env.RANKWISE_NVIDIA_SITE
  if (site === undefined) return kind.names
  const files = kind.siteFiles.map((name) => join(site, name))
  const found = files.filter((path) => existsSync(path))
  return found.length > 0 ? found : files
}

function requireLinux(): void {
  if (process.platform === 'linux') return
  throw new RankwiseError('NCCL_UNSUPPORTED', 'NCCL exists for Linux only', {
    actual: { platform: process.platform },
    rule: "'nccl' collectives need Linux",
    remedy: "use 'local' collectives",
  })
}

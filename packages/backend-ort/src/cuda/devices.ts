import { join } from 'node:path'
import { type Environment, rendezvousFromEnv } from '@rankwise/core'
import type { Addon } from '../engine/addon.ts'
import { messageOf } from '../engine/session-error.ts'
import { cudaError } from './cuda-error.ts'

// Names, files and variables are those of @rankwise/collectives-nccl, so that one setting serves both.
const NAMES = ['libcudart.so.13', 'libcudart.so.12']
const SITE_FILES = ['nvidia/cu13/lib/libcudart.so.13', 'nvidia/cuda_runtime/lib/libcudart.so.12']

/** What the dynamic linker is asked for, best first; what is named is the only place that is looked at. */
export function cudartCandidates(env: Environment = process.env): readonly string[] {
  if (env.RANKWISE_CUDART_LIBRARY) return [env.RANKWISE_CUDART_LIBRARY]
  const site = env.RANKWISE_NVIDIA_SITE
  return site ? SITE_FILES.map((file) => join(site, file)) : NAMES
}

/**
 * The number of GPUs that the process sees.
 *
 * @throws RankwiseError `ORT_CUDA` with what was said of every place where libcudart is not, or why there is no GPU
 */
export function countDevices(addon: Addon, env?: Environment): number {
  const tried: string[] = []
  for (const library of cudartCandidates(env)) {
    try {
      return addon.cudaDevices(library)
    } catch (cause) {
      const message = messageOf(cause)
      if (message.startsWith('cudaGetDeviceCount')) throw noDevice(library, cause)
      tried.push(message)
    }
  }
  throw cudaError('the CUDA runtime does not load', {
    where: 'libcudart',
    actual: { tried },
    remedy:
      "install NVIDIA's package cuda-cudart-13-0, or `pip install nvidia-cuda-runtime` and set RANKWISE_NVIDIA_SITE to its " +
      'site-packages folder, or RANKWISE_CUDART_LIBRARY to the file',
  })
}

/**
 * The GPU of a rank: the one that is asked for, or else that of its number on this machine, or the only one.
 *
 * @throws RankwiseError `ORT_CUDA`
 */
export function chooseDevice(count: number, chosen: number | undefined, env?: Environment): number {
  const { localRank } = rendezvousFromEnv(env)
  const device = chosen ?? (count === 1 ? 0 : localRank)
  if (Number.isInteger(device) && device >= 0 && device < count) return device
  throw cudaError('there is no GPU of this number', {
    actual: { deviceId: device, visibleGpus: count, localRank },
    remedy:
      'give a deviceId from 0 to the number of visible GPUs - 1, start as many ranks on this machine as it has GPUs, and ' +
      'check CUDA_VISIBLE_DEVICES',
  })
}

function noDevice(library: string, cause: unknown) {
  return cudaError('there is no GPU that can be used', {
    where: library,
    remedy: 'install or update the NVIDIA driver, check `nvidia-smi`, and in a container pass the GPUs (`--gpus all`)',
    cause,
  })
}

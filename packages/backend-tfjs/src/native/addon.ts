import { existsSync } from 'node:fs'
import { createRequire } from 'node:module'
import { homedir } from 'node:os'
import { dirname, join } from 'node:path'
import { RankwiseError } from '@rankwise/core'
import type { TfjsBinding } from './binding.ts'

const require = createRequire(import.meta.url)

/** What `scripts/build-tfjs-native.mjs` builds, and of which versions. */
const BUILD = 'tfjs-node-4.22.0-tensorflow-2.21.0'

const ADDON = 'tfjs_binding.node'

/** Versions of Node-API that tfjs-node is published for. */
const NAPI_VERSIONS = [8, 7, 6, 5, 4, 3]

/** An addon that is there, and who put it there. */
export interface FoundAddon {
  readonly path: string
  readonly origin: string
}

/** The folder of the addon that the build script of Rankwise makes. */
export function buildFolder(env: NodeJS.ProcessEnv = process.env): string {
  const cache = env.XDG_CACHE_HOME || join(homedir(), '.cache')
  return join(cache, 'rankwise', `${BUILD}-${process.platform}-${process.arch}`)
}

/**
 * Addons that are there, the one to load first: that of `RANKWISE_TFJS_ADDON`, of the package for GPUs, of the build
 * script, of the package for CPUs.
 */
export function findAddons(env: NodeJS.ProcessEnv = process.env): readonly FoundAddon[] {
  const built = join(buildFolder(env), ADDON)
  const candidates = [
    { path: env.RANKWISE_TFJS_ADDON, origin: 'RANKWISE_TFJS_ADDON' },
    { path: packagedAddon('@tensorflow/tfjs-node-gpu'), origin: '@tensorflow/tfjs-node-gpu' },
    { path: existsSync(built) ? built : undefined, origin: 'build-tfjs-native' },
    { path: packagedAddon('@tensorflow/tfjs-node'), origin: '@tensorflow/tfjs-node' },
  ]
  return candidates.flatMap(({ path, origin }) => (path ? [{ path, origin }] : []))
}

function packagedAddon(name: string): string | undefined {
  try {
    const folder = dirname(require.resolve(`${name}/package.json`))
    const paths = NAPI_VERSIONS.map((version) => join(folder, 'lib', `napi-v${version}`, ADDON))
    return paths.find((path) => existsSync(path))
  } catch {
    return undefined
  }
}

/** An addon that is loaded into this process, with what it was told when it was. */
export interface LoadedAddon {
  readonly binding: TfjsBinding
  readonly origin: string
  readonly threads: number
}

let loaded: LoadedAddon | undefined

/**
 * Loads the first addon that loads. TensorFlow is configured when it is loaded, so there is one addon and one number of
 * threads in a process.
 *
 * @throws RankwiseError `TFJS_ENGINE` when there is none or none loads, `BACKEND_THREADS` when it was loaded with another
 *   number of threads
 */
export function loadAddon(threads: number, env: NodeJS.ProcessEnv = process.env): LoadedAddon {
  loaded ??= loadFirst(findAddons(env), threads)
  if (loaded.threads === threads) return loaded
  throw new RankwiseError('BACKEND_THREADS', 'TensorFlow runs on another number of threads already', {
    actual: { threads, running: loaded.threads },
    rule: 'the number of threads of the native engine is fixed when a process first uses it',
  })
}

function loadFirst(addons: readonly FoundAddon[], threads: number): LoadedAddon {
  if (addons.length === 0) {
    throw new RankwiseError('TFJS_ENGINE', 'there is no native library of TensorFlow.js', {
      where: buildFolder(),
      rule: 'the native engine needs @tensorflow/tfjs-node-gpu, @tensorflow/tfjs-node, or an addon that was built',
      remedy: 'install @tensorflow/tfjs-node, or run scripts/build-tfjs-native.mjs of the Rankwise repository',
    })
  }
  configure(threads)
  const failures: string[] = []
  for (const { path, origin } of addons) {
    try {
      return { binding: require(path) as TfjsBinding, origin, threads }
    } catch (cause) {
      failures.push(`${origin} (${path}): ${cause instanceof Error ? cause.message : String(cause)}`)
    }
  }
  throw new RankwiseError('TFJS_ENGINE', 'no native library of TensorFlow.js loads', {
    actual: { failures },
    remedy: 'install the package again, or run scripts/build-tfjs-native.mjs of the Rankwise repository',
  })
}

/** What TensorFlow reads from the environment when it is loaded. What the user has set stays. */
function configure(threads: number): void {
  process.env.TF_NUM_INTRAOP_THREADS = String(threads)
  // Operations run one after the other, in the thread that asks for them.
  process.env.TF_NUM_INTEROP_THREADS = '1'
  // Neither what it detects nor what it would like to be compiled with.
  process.env.TF_CPP_MIN_LOG_LEVEL ??= '2'
  process.env.TF_FORCE_GPU_ALLOW_GROWTH ??= 'true'
  const { LOCAL_RANK } = process.env
  // One GPU for each rank of a machine; without it, every rank would take the first.
  if (LOCAL_RANK !== undefined) process.env.CUDA_VISIBLE_DEVICES ??= LOCAL_RANK
}

import type { EngineChoice } from '@rankwise/backend-ort'
import type { EngineName } from '@rankwise/backend-tfjs'
import { type Backend, RankwiseError } from '@rankwise/core'

export interface BackendChoice {
  /** Intra-op threads of each rank; undefined leaves it to the backend. */
  readonly threads: number | undefined
}

/** Backend packages are imported only when they are asked for. */
const BACKENDS: Readonly<Record<string, (choice: BackendChoice) => Promise<Backend>>> = {
  ort: ({ threads }) => createOrt(undefined, threads),
  'ort-capi': ({ threads }) => createOrt('capi', threads),
  'ort-binding': ({ threads }) => createOrt('binding', threads),
  tfjs: ({ threads }) => createTfjs('auto', threads),
  'tfjs-native-gpu': ({ threads }) => createTfjs('native-gpu', threads),
  'tfjs-native': ({ threads }) => createTfjs('native', threads),
  'tfjs-wasm': ({ threads }) => createTfjs('wasm', threads),
}

async function createOrt(engine: EngineChoice | undefined, threads: number | undefined): Promise<Backend> {
  const { ort } = await import('@rankwise/backend-ort')
  const backend = await ort({ device: 'cpu', engine, threads })
  reportSelection('ort', backend.selection)
  return backend
}

async function createTfjs(engine: EngineName | 'auto', threads: number | undefined): Promise<Backend> {
  const { tfjs } = await import('@rankwise/backend-tfjs')
  const backend = await tfjs({ engine, threads })
  reportSelection('tfjs', backend.selection)
  return backend
}

interface Selection {
  readonly engine: string
  readonly rejected: readonly { readonly engine: string; readonly reason: string }[]
}

/** What `auto` took, where it would have preferred something else. All ranks of a machine choose alike: one says so. */
function reportSelection(backend: string, { engine, rejected }: Selection): void {
  if (Number(process.env.LOCAL_RANK ?? 0) !== 0) return
  for (const { engine: preferred, reason } of rejected) {
    console.error(`${backend}: ${engine}, as ${preferred} cannot be used: ${reason.split('\n', 1)[0]}`)
  }
}

export const BACKEND_NAMES = Object.keys(BACKENDS)

/** @throws RankwiseError `BACKEND_UNKNOWN`, and those of the backend */
export async function createBackend(name: string, choice: BackendChoice): Promise<Backend> {
  const create = Object.hasOwn(BACKENDS, name) ? BACKENDS[name] : undefined
  if (create === undefined) {
    throw new RankwiseError('BACKEND_UNKNOWN', `there is no backend '${name}'`, { actual: { known: BACKEND_NAMES } })
  }
  return create(choice)
}

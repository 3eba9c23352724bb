import type { EngineName, EngineSelection } from '@rankwise/backend-tfjs'
import { type Backend, RankwiseError } from '@rankwise/core'

export interface BackendChoice {
  /** Intra-op threads of each rank; undefined leaves it to the backend. */
  readonly threads: number | undefined
}

/** Backend packages are imported only when they are asked for. */
const BACKENDS: Readonly<Record<string, (choice: BackendChoice) => Promise<Backend>>> = {
  ort: async ({ threads }) => {
    const { ort } = await import('@rankwise/backend-ort')
    return ort({ device: 'cpu', ...(threads === undefined ? {} : { threads }) })
  },
  tfjs: ({ threads }) => createTfjs('auto', threads),
  'tfjs-native-gpu': ({ threads }) => createTfjs('native-gpu', threads),
  'tfjs-native': ({ threads }) => createTfjs('native', threads),
  'tfjs-wasm': ({ threads }) => createTfjs('wasm', threads),
}

async function createTfjs(engine: EngineName | 'auto', threads: number | undefined): Promise<Backend> {
  const { tfjs } = await import('@rankwise/backend-tfjs')
  const backend = await tfjs({ engine, threads })
  // All ranks of a machine choose alike: one of them says so.
  if (Number(process.env.LOCAL_RANK ?? 0) === 0) reportSelection(backend.selection)
  return backend
}

/** What `auto` took, where it would have preferred something else. */
function reportSelection({ engine, rejected }: EngineSelection): void {
  for (const { engine: preferred, reason } of rejected) {
    console.error(`tfjs: ${engine}, as ${preferred} cannot be used: ${reason.split('\n', 1)[0]}`)
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

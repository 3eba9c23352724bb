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

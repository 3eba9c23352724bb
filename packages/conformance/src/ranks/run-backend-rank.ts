import { type Backend, initProcessGroup, RankwiseError, TensorParallelConfig } from '@rankwise/core'
import type { BackendRankResult, BackendRankTask } from '../backend/rank-checks.ts'
import { loadTinyGolden, TINY_DIRECTORY } from '../tiny-golden.ts'
import { type TinyInputs, TinyTransformer } from '../tiny-transformer.ts'
import { runRank } from './run-rank.ts'

/** What one rank of `defineBackendConformance` runs on. */
export interface BackendRankOptions {
  /** The backend under test. */
  readonly create: () => Promise<Backend> | Backend
  /** Name of the collectives, whose package the worker imports. @default 'local' */
  readonly collectives?: string
}

/** The body of the `worker` module of `defineBackendConformance`. */
export function runBackendRank({ create, collectives = 'local' }: BackendRankOptions): void {
  runRank(async ({ dtype }: BackendRankTask): Promise<BackendRankResult> => {
    await using group = await initProcessGroup({ backend: collectives })
    await using backend = await create()
    const inputs = Object.fromEntries(
      Object.entries((await loadTinyGolden()).inputs).map(([name, x]) => [name, x.cast(dtype)]),
    ) as TinyInputs
    const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
    const model = await TinyTransformer.fromPretrained(TINY_DIRECTORY, { backend, dtype, parallelConfig })
    const outputs = Object.entries(await model.run(inputs)).map(([name, { dtype: type, shape, data }]) => {
      return [name, { dtype: type, shape, data }] as const
    })
    // The last run: a group that was aborted cannot be used any more.
    const options = group.rank === 0 ? { signal: AbortSignal.abort() } : {}
    const aborted = await model.run(inputs, options).then(
      () => 'nothing was thrown',
      (error: unknown) => (error instanceof RankwiseError ? error.code : String(error)),
    )
    await model.dispose()
    return { outputs: Object.fromEntries(outputs), memory: backend.memory(), aborted }
  })
}

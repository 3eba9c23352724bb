import { type Backend, initProcessGroup, RankwiseError, type Tensor, TensorParallelConfig } from '@rankwise/core'
import type { BackendRankOutputs, BackendRankResult, BackendRankTask } from '../backend/rank-checks.ts'
import { loadTinyGolden, TINY_DIRECTORY, tinyInputsIn } from '../tiny-golden.ts'
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
  runRank(async ({ dtypes }: BackendRankTask): Promise<BackendRankResult> => {
    await using group = await initProcessGroup({ backend: collectives })
    await using backend = await create()
    const { inputs: golden } = await loadTinyGolden()
    const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
    const outputs: Record<string, BackendRankOutputs> = {}
    let aborted = ''
    for (const dtype of dtypes) {
      const inputs = tinyInputsIn(golden, dtype, dtypes)
      const model = await TinyTransformer.fromPretrained(TINY_DIRECTORY, { backend, dtype, parallelConfig })
      outputs[dtype] = cloneable(await model.run(inputs))
      // The last run: a group that was aborted cannot be used any more.
      if (dtype === dtypes.at(-1)) aborted = await abortedRun(model, inputs, group.rank)
      await model.dispose()
    }
    return { outputs, memory: backend.memory(), aborted }
  })
}

function cloneable(outputs: Readonly<Record<string, Tensor>>): BackendRankOutputs {
  return Object.fromEntries(
    Object.entries(outputs).map(([name, { dtype, shape, data }]) => [name, { dtype, shape, data }]),
  )
}

/** The code of a run that rank 0 aborts. */
function abortedRun(model: TinyTransformer, inputs: TinyInputs, rank: number): Promise<string> {
  return model.run(inputs, rank === 0 ? { signal: AbortSignal.abort() } : {}).then(
    () => 'nothing was thrown',
    (error: unknown) => (error instanceof RankwiseError ? error.code : String(error)),
  )
}

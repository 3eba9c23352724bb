import { join, posix } from 'node:path'
import type { Backend } from './backend.ts'
import { checkPlan, collectivesFor } from './check-plan.ts'
import type { Collectives } from './collectives.ts'
import type { DType } from './dtype.ts'
import { RankwiseError } from './errors.ts'
import { type FileSelection, type HubRepository, openWeights as openHubWeights } from './hub/index.ts'
import { type LoadedWeights, loadWeights } from './load-weights.ts'
import type { ModelClass, ModelMixin } from './model.ts'
import type { ParameterPlacements } from './plan.ts'
import { checkQuantization, type FromPretrainedOptions } from './pretrained-options.ts'
import { parseConfig, readConfigText } from './read-config.ts'
import { openWeights } from './save/index.ts'
import { textOf } from './value-text.ts'

/** What a loaded model runs with. */
export interface Runtime extends LoadedWeights {
  /** The class that loaded the model; a subclass may build instances of its base. */
  readonly type: ModelClass<ModelMixin>
  /** Text of its config.json. */
  readonly config: string
  readonly backend: Backend
  readonly dtype: DType
  readonly tpDegree: number
  /** Whether the model was split, be it over one rank. */
  readonly isParallel: boolean
  readonly placements: ParameterPlacements
  readonly collectives: Collectives | undefined
}

/** What a model computes in that is not told. */
export const DEFAULT_DTYPE = 'float32'

export const DEFAULT_WEIGHTS_NAME = 'diffusion_pytorch_model'

/** Everything of a load that can fail on one rank alone; the options are checked. */
export async function loadModel<M extends ModelMixin>(
  type: ModelClass<M>,
  place: string | HubRepository,
  options: FromPretrainedOptions,
): Promise<{ readonly model: M; readonly runtime: Runtime }> {
  const { subfolder = '', backend, dtype = DEFAULT_DTYPE, parallelConfig, onProgress, signal } = options
  const tpDegree = parallelConfig?.tpDegree ?? 1
  const weightsName = type.weightsName ?? DEFAULT_WEIGHTS_NAME
  const directory = join(
    await localFolder(
      place,
      { files: [posix.join(subfolder, 'config.json')], folders: [subfolder], weightsNames: [weightsName] },
      signal,
    ),
    subfolder,
  )
  const configPath = join(directory, 'config.json')
  const config = await readConfigText(configPath)
  const parsed = parseConfig(config, configPath)
  checkQuantization(type.name, parsed)
  const model = type.fromConfig(parsed)
  const placements = checkPlan(type, model, tpDegree, parallelConfig !== undefined)
  const collectives = collectivesFor(type.name, tpDegree)
  await using source =
    typeof place === 'string'
      ? await openWeights(directory, { weightsName })
      : await openHubWeights(place, { subfolder, weightsName, download: options.download, signal, onProgress })
  const weights = await loadWeights(source, model, {
    placements,
    rank: collectives?.rank ?? 0,
    tpDegree,
    backend,
    dtype,
    component: subfolder || type.name,
    ignored: type.ignoredWeights ?? [],
    tied: type.tiedWeights ?? {},
    signal,
    onProgress,
  })
  const isParallel = parallelConfig !== undefined
  return { model, runtime: { type, config, ...weights, backend, dtype, tpDegree, isParallel, placements, collectives } }
}

/** The folder itself, or that of a repository's small files in the cache: weights are not downloaded yet. */
async function localFolder(
  place: string | HubRepository,
  selection: FileSelection,
  signal: AbortSignal | undefined,
): Promise<string> {
  return typeof place === 'string' ? place : place.download({ ...selection, weights: false }, { signal })
}

/** @throws RankwiseError `DTYPE_UNSUPPORTED` */
export function checkDtype(model: string, backend: Backend, dtype: DType): void {
  if (backend.supports.dtypes.includes(dtype)) return
  throw new RankwiseError('DTYPE_UNSUPPORTED', `the backend ${backend.name} does not compute in ${textOf(dtype)}`, {
    where: model,
    actual: { dtype, supported: backend.supports.dtypes },
    rule: 'dtype is one that the backend computes in; weights stored in another are cast after slicing',
  })
}

import {
  type FromFirst,
  hubOptionsOf,
  joinedCollectives,
  loadTogether,
  openPretrained,
  RankwiseError,
} from '@rankwise/core'
import type { Callable } from '@rankwise/diffusion'
import type { Flux2FromPretrainedOptions } from './components.ts'
import type { Flux2KleinOptions } from './generation-options.ts'
import { type ModelIndex, readModelIndex } from './model-index.ts'
import type { Flux2PipelineBase } from './pipeline-base.ts'
import { Flux2Pipeline } from './pipeline-dev.ts'
import { Flux2KleinPipeline } from './pipeline-klein.ts'
import { Flux2KleinKVPipeline } from './pipeline-klein-kv.ts'

/**
 * A pipeline of any class; `instanceof` tells which. Options that its class does not have are refused when it is called.
 */
export type AnyFlux2Pipeline = Callable<Flux2PipelineBase<Flux2KleinOptions>>

type Load = (pathOrId: string, options: Flux2FromPretrainedOptions) => Promise<AnyFlux2Pipeline>

const CLASSES: ReadonlyMap<string, Load> = new Map<string, Load>([
  ['Flux2Pipeline', (...args) => Flux2Pipeline.fromPretrained(...args)],
  ['Flux2KleinPipeline', (...args) => Flux2KleinPipeline.fromPretrained(...args)],
  ['Flux2KleinKVPipeline', (...args) => Flux2KleinKVPipeline.fromPretrained(...args)],
])

/** What the folder of a pipeline says of its class, and where it was read. */
interface Found {
  readonly index: ModelIndex
  /** Commit of the hub's repository that it is of. */
  readonly commit: string | undefined
}

/** Loads pipelines of which only the folder is known. */
// biome-ignore lint/complexity/noStaticOnlyClass: diffusers has it as a class with fromPretrained
export class DiffusionPipeline {
  /**
   * Loads the pipeline that the `model_index.json` of a folder, or of an id on a hub, names: `Flux2Pipeline`,
   * `Flux2KleinPipeline` or `Flux2KleinKVPipeline`, as the `fromPretrained` of that class does.
   *
   * @throws RankwiseError `PIPELINE_CLASS` for another class, `CONFIG_NOT_FOUND`, `CONFIG_INVALID`, and those of the class
   */
  static async fromPretrained(pathOrId: string, options: Flux2FromPretrainedOptions): Promise<AnyFlux2Pipeline> {
    const { index, commit } = await findPipeline(pathOrId, options)
    const load = CLASSES.get(index.className) as Load
    return load(pathOrId, { ...options, ...(commit === undefined ? {} : { revision: commit }) })
  }
}

/** On all ranks or on none, so that none waits for one that cannot read it. */
async function findPipeline(pathOrId: string, options: Flux2FromPretrainedOptions): Promise<Found> {
  const find = async (signal: AbortSignal, fromFirst: FromFirst): Promise<Found> => {
    const repository = await openPretrained(pathOrId, { ...hubOptionsOf(options), signal, fromFirst })
    const selection = { files: ['model_index.json'], folders: [], weights: false }
    const directory = (await repository?.download(selection, { signal })) ?? pathOrId
    const index = await readModelIndex(directory)
    if (!CLASSES.has(index.className)) throw unknownClass(index, pathOrId)
    return { index, commit: repository?.commit }
  }
  return loadTogether(find, {
    collectives: joinedCollectives(options.parallelConfig?.tpDegree ?? 1),
    signal: options.signal,
    release: () => {},
  })
}

function unknownClass({ className }: ModelIndex, where: string): RankwiseError {
  return new RankwiseError('PIPELINE_CLASS', `there is no pipeline ${className}`, {
    where,
    actual: { className, known: [...CLASSES.keys()] },
    rule: 'the class in model_index.json is one of those that are known',
  })
}

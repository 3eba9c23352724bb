import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import type { Backend } from './backend.ts'
import { Checkpoint } from './checkpoint/index.ts'
import type { Collectives } from './collectives.ts'
import type { DType } from './dtype.ts'
import { RankwiseError } from './errors.ts'
import { GraphExecutor, type RunOptions } from './executor.ts'
import type { Graph } from './graph.ts'
import { type LoadedWeights, type LoadProgress, type LoadReport, loadWeights } from './load-weights.ts'
import { Module } from './module.ts'
import type { TensorParallelConfig } from './parallel-config.ts'
import { partition } from './partition.ts'
import { checkDegree, legalDegrees, type ParameterPlacements, resolvePlan, type TensorParallelPlan } from './plan.ts'
import { getProcessGroup } from './process-group.ts'
import type { Tensor } from './tensor.ts'
import type { TracedTensor } from './traced-tensor.ts'
import { trace } from './tracer.ts'

/** Options of `fromPretrained`. */
export interface FromPretrainedOptions {
  /** Folder of the model inside the pipeline's. @default the folder itself */
  readonly subfolder?: string
  /** What the model computes in, whatever the checkpoint stores. @default 'float32' */
  readonly dtype?: DType
  readonly backend: Backend
  /** Splits the model over the ranks of the process group. @default every rank holds all of it */
  readonly parallelConfig?: TensorParallelConfig
  /** Aborts the load with `ABORTED`. */
  readonly signal?: AbortSignal
  /** Called after every weight. */
  readonly onProgress?: (progress: LoadProgress) => void
}

/** A model class, as `fromPretrained` and reports need it. */
export interface ModelClass<M extends ModelMixin> {
  readonly name: string
  /** Which Linears are split over ranks; a class without one runs on every rank alike. */
  readonly tensorParallelPlan?: TensorParallelPlan
  /** Base name of the weight files. @default 'diffusion_pytorch_model' */
  readonly weightsName?: string
  /** Weights that a checkpoint may have and this class does not use. */
  readonly ignoredWeights?: readonly RegExp[]
  /** Builds the model without weights. @throws RankwiseError `CONFIG_INVALID` */
  fromConfig(config: unknown): M
}

interface Runtime extends LoadedWeights {
  readonly backend: Backend
  readonly dtype: DType
  readonly tpDegree: number
  readonly placements: ParameterPlacements
  readonly collectives: Collectives | undefined
}

/** A model that loads its weights from a checkpoint folder and runs on a backend, whole or split over ranks. */
export abstract class ModelMixin extends Module {
  #runtime: Runtime | undefined
  readonly #executors = new Map<string, Promise<GraphExecutor>>()

  /** Number of attention heads, which a tensor-parallel degree has to divide; undefined where there are none. */
  get numAttentionHeads(): number | undefined {
    return undefined
  }

  /** The model at small shapes: enough to check every placement before weights are read. */
  abstract traceExample(): Graph

  /**
   * Loads a model from a folder as diffusers writes it. Config, plan, degree, placements and the headers of the weight
   * files are checked before any weight is read; then every rank reads only its own slices.
   *
   * @param path - folder of the model or, with `subfolder`, of its pipeline
   * @throws RankwiseError `CONFIG_NOT_FOUND`, `CONFIG_INVALID`, `DTYPE_UNSUPPORTED`, `PROCESS_GROUP_NOT_INITIALIZED`,
   *   `TP_DEGREE_WORLD_SIZE`, `PLAN_*`, `HEADS_NOT_DIVISIBLE`, `BLOCK_NOT_DIVISIBLE`, `PLACEMENT_*`, `WEIGHTS_*`,
   *   `CHECKPOINT_*`, `SAFETENSORS_*`, `ABORTED`
   */
  static async fromPretrained<M extends ModelMixin>(
    this: ModelClass<M>,
    path: string,
    options: FromPretrainedOptions,
  ): Promise<M> {
    const { backend, dtype = 'float32', parallelConfig, signal, onProgress } = options
    checkDtype(this.name, backend, dtype)
    const tpDegree = parallelConfig?.tpDegree ?? 1
    const directory = options.subfolder === undefined ? path : join(path, options.subfolder)
    const model = this.fromConfig(await readConfig(directory))
    const placements = checkPlan(this, model, tpDegree, parallelConfig !== undefined)
    const collectives = groupFor(this.name, tpDegree)
    await using checkpoint = await Checkpoint.open(directory, { weightsName: this.weightsName ?? DEFAULT_WEIGHTS_NAME })
    const weights = await loadWeights(checkpoint, model, {
      placements,
      rank: collectives?.rank ?? 0,
      tpDegree,
      backend,
      dtype,
      component: options.subfolder ?? this.name,
      ignored: this.ignoredWeights ?? [],
      signal,
      onProgress,
    })
    model.#runtime = { ...weights, backend, dtype, tpDegree, placements, collectives }
    return model
  }

  /** The ranks that share this model; undefined when it is not split. */
  get collectives(): Collectives | undefined {
    return this.#runtime?.collectives
  }

  /** What the model computes in. @throws RankwiseError `MODEL_NOT_LOADED` */
  get dtype(): DType {
    return this.#loaded().dtype
  }

  /** What loading read and what it would have been without splitting. @throws RankwiseError `MODEL_NOT_LOADED` */
  get loadReport(): LoadReport {
    return this.#loaded().report
  }

  /** Frees the weights and everything compiled; idempotent. */
  async dispose(): Promise<void> {
    const executors = [...this.#executors.values()]
    this.#executors.clear()
    for (const executor of await Promise.allSettled(executors)) {
      if (executor.status === 'fulfilled') await executor.value.dispose()
    }
    for (const weight of this.#runtime?.weights.values() ?? []) weight.dispose()
    this.#runtime = undefined
  }

  /** `dispose`, for `await using`. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.dispose()
  }

  /**
   * This rank's shard of a weight, on the host.
   *
   * @throws RankwiseError `MODEL_NOT_LOADED`, `WEIGHT_NOT_LOADED`
   */
  protected async weight(name: string): Promise<Tensor> {
    const { backend, weights } = this.#loaded()
    const weight = weights.get(name)
    if (weight === undefined) throw new RankwiseError('WEIGHT_NOT_LOADED', 'the weight is not loaded', { where: name })
    return backend.download(weight)
  }

  /** Runs a forward on concrete tensors. It is traced, placed and compiled once per method and input shapes. */
  protected async execute<I extends Record<string, Tensor>>(
    method: string,
    inputs: I,
    forward: (inputs: { readonly [K in keyof I]: TracedTensor }) => Readonly<Record<string, TracedTensor>>,
    options?: RunOptions,
  ): Promise<Record<string, Tensor>> {
    const shapes = Object.entries(inputs).map(([name, { dtype, shape }]) => `${name}:${dtype}[${shape.join()}]`)
    const key = `${method} ${shapes.join(' ')}`
    const { backend, collectives, weights, dtype, placements, tpDegree } = this.#loaded()
    const executor =
      this.#executors.get(key) ??
      GraphExecutor.compile(
        partition(trace(`${this.constructor.name}.${method}`, this, inputs, forward, dtype), placements, tpDegree),
        { backend, collectives, weights },
      )
    this.#executors.set(key, executor)
    executor.catch(() => this.#executors.delete(key))
    return (await executor).run(inputs, options)
  }

  #loaded(): Runtime {
    if (this.#runtime === undefined) {
      throw new RankwiseError('MODEL_NOT_LOADED', 'the model has no weights', {
        where: this.constructor.name,
        remedy: 'load it with fromPretrained',
      })
    }
    return this.#runtime
  }
}

const DEFAULT_WEIGHTS_NAME = 'diffusion_pytorch_model'

/** Reads `config.json` of a model folder. @throws RankwiseError `CONFIG_NOT_FOUND`, `CONFIG_INVALID` */
export async function readConfig(directory: string, file = 'config.json'): Promise<unknown> {
  const path = join(directory, file)
  let text: string
  try {
    text = await readFile(path, 'utf8')
  } catch (cause) {
    throw new RankwiseError('CONFIG_NOT_FOUND', `there is no ${file}`, {
      where: path,
      remedy: 'give the folder that diffusers wrote, and the subfolder of the model in it',
      cause,
    })
  }
  try {
    return JSON.parse(text)
  } catch (cause) {
    throw new RankwiseError('CONFIG_INVALID', `${file} is not JSON`, { where: path, cause })
  }
}

function checkDtype(model: string, backend: Backend, dtype: DType): void {
  if (backend.supports.dtypes.includes(dtype)) return
  throw new RankwiseError('DTYPE_UNSUPPORTED', `the backend ${backend.name} does not compute in ${dtype}`, {
    where: model,
    actual: { dtype, supported: backend.supports.dtypes },
    rule: 'dtype is one that the backend computes in; weights stored in another are cast after slicing',
  })
}

function groupFor(model: string, tpDegree: number): Collectives | undefined {
  if (tpDegree === 1) return undefined
  const group = getProcessGroup()
  if (group === undefined) {
    throw new RankwiseError('PROCESS_GROUP_NOT_INITIALIZED', 'there is no process group to split the model over', {
      where: model,
      actual: { tpDegree },
      remedy: "call initProcessGroup({ backend: 'local' }) first, and start the script with rankwise run",
    })
  }
  if (group.worldSize !== tpDegree) {
    throw new RankwiseError('TP_DEGREE_WORLD_SIZE', `degree ${tpDegree} in a group of ${group.worldSize} ranks`, {
      where: model,
      actual: { tpDegree, worldSize: group.worldSize },
      rule: 'the tensor-parallel degree is the size of the process group',
    })
  }
  return group.collectives
}

/**
 * Resolves a class's plan and checks it at a degree: heads, blocks, and every placement of the traced model.
 *
 * @param required - whether a class without a plan is refused
 * @throws RankwiseError `PLAN_MISSING`, `PLAN_*`, `HEADS_NOT_DIVISIBLE`, `BLOCK_NOT_DIVISIBLE`, `PLACEMENT_*`
 */
export function checkPlan<M extends ModelMixin>(
  { name, tensorParallelPlan }: Pick<ModelClass<M>, 'name' | 'tensorParallelPlan'>,
  model: M,
  tpDegree: number,
  required: boolean,
): ParameterPlacements {
  if (tensorParallelPlan === undefined && required) {
    throw new RankwiseError('PLAN_MISSING', `${name} has no tensor-parallel plan`, {
      where: name,
      rule: 'only a class with a tensorParallelPlan can be split',
    })
  }
  const placements = resolvePlan(model, tensorParallelPlan ?? {})
  checkDegree(placements, model.numAttentionHeads, tpDegree)
  partition(model.traceExample(), placements, tpDegree)
  return placements
}

/** The degrees a model of this class can be split by. */
export function legalDegreesOf<M extends ModelMixin>(type: ModelClass<M>, model: M): readonly number[] {
  return legalDegrees(resolvePlan(model, type.tensorParallelPlan ?? {}), model.numAttentionHeads)
}

import { join } from 'node:path'
import type { Backend } from './backend.ts'
import { checkPlan, collectivesFor, type PlannedClass, type PlannedModel } from './check-plan.ts'
import { Checkpoint } from './checkpoint/index.ts'
import type { Collectives } from './collectives.ts'
import type { DType } from './dtype.ts'
import { RankwiseError } from './errors.ts'
import { GraphExecutor, type RunOptions } from './executor.ts'
import { ExecutorCache } from './executor-cache.ts'
import type { Graph } from './graph.ts'
import { type LoadedWeights, type LoadReport, loadWeights } from './load-weights.ts'
import { Module } from './module.ts'
import type { TensorParallelConfig } from './parallel-config.ts'
import { partition } from './partition.ts'
import type { ParameterPlacements } from './plan.ts'
import {
  checkOptions,
  checkParallelConfig,
  checkQuantization,
  type FromPretrainedOptions,
} from './pretrained-options.ts'
import { readConfig } from './read-config.ts'
import { type SplitOptions, splitWeights } from './split-weights.ts'
import type { Tensor } from './tensor.ts'
import type { TracedTensor } from './traced-tensor.ts'
import { trace } from './tracer.ts'

/** A model class, as `fromPretrained` and reports need it. */
export interface ModelClass<M extends ModelMixin> extends PlannedClass {
  /** Base name of the weight files. @default 'diffusion_pytorch_model' */
  readonly weightsName?: string
  /** Weights that a checkpoint may have and this class does not use. */
  readonly ignoredWeights?: readonly RegExp[]
  /** Builds the model without weights. @throws RankwiseError `CONFIG_INVALID` */
  fromConfig(config: unknown): M
}

interface Runtime extends LoadedWeights {
  /** The class that loaded the model; a subclass may build instances of its base. */
  readonly type: PlannedClass
  readonly backend: Backend
  readonly dtype: DType
  readonly tpDegree: number
  /** Whether the model was split, be it over one rank. */
  readonly isParallel: boolean
  readonly placements: ParameterPlacements
  readonly collectives: Collectives | undefined
}

/** A model that loads its weights from a checkpoint folder and runs on a backend, whole or split over ranks. */
export abstract class ModelMixin extends Module implements PlannedModel {
  #runtime: Runtime | undefined
  readonly #executors = new ExecutorCache()

  /** Number of attention heads, which a tensor-parallel degree has to divide; undefined where there are none. */
  get numAttentionHeads(): number | undefined {
    return undefined
  }

  /** The model at small shapes: enough to check every placement before weights are read. */
  abstract traceExample(): Graph

  /**
   * Loads a model from a folder as diffusers writes it. Options, config, plan, degree, placements and the headers of the
   * weight files are checked before any weight is read; then every rank reads only its own slices.
   *
   * @param path - folder of the model or, with `subfolder`, of its pipeline
   * @throws RankwiseError `OPTION_UNKNOWN`, `*_UNSUPPORTED`, `CONFIG_NOT_FOUND`, `CONFIG_INVALID`, `DTYPE_UNSUPPORTED`,
   *   `PLAN_*`, `HEADS_NOT_DIVISIBLE`, `BLOCK_NOT_DIVISIBLE`, `PLACEMENT_*`, `PROCESS_GROUP_NOT_INITIALIZED`,
   *   `TP_DEGREE_WORLD_SIZE`, `WEIGHTS_*`, `CHECKPOINT_*`, `SAFETENSORS_*`, `ABORTED`
   */
  static async fromPretrained<M extends ModelMixin>(
    this: ModelClass<M>,
    path: string,
    options: FromPretrainedOptions,
  ): Promise<M> {
    checkOptions(this.name, options)
    const { backend, dtype = 'float32', parallelConfig, signal, onProgress } = options
    checkDtype(this.name, backend, dtype)
    const tpDegree = parallelConfig?.tpDegree ?? 1
    const directory = options.subfolder === undefined ? path : join(path, options.subfolder)
    const config = await readConfig(directory)
    checkQuantization(this.name, config)
    const model = this.fromConfig(config)
    const placements = checkPlan(this, model, tpDegree, parallelConfig !== undefined)
    const collectives = collectivesFor(this.name, tpDegree)
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
    const isParallel = parallelConfig !== undefined
    model.#runtime = { type: this, ...weights, backend, dtype, tpDegree, isParallel, placements, collectives }
    return model
  }

  /**
   * Splits a model that is loaded whole over the ranks of the process group: the same slices as loading it split. When
   * it fails, the model is as it was; when it succeeds, the whole weights are freed.
   *
   * @throws RankwiseError `MODEL_NOT_LOADED`, `PARALLEL_ALREADY`, `PARALLEL_CONFIG_INVALID`,
   *   `CONTEXT_PARALLEL_UNSUPPORTED`, `PLAN_*`, `HEADS_NOT_DIVISIBLE`, `BLOCK_NOT_DIVISIBLE`, `PLACEMENT_*`,
   *   `PROCESS_GROUP_NOT_INITIALIZED`, `TP_DEGREE_WORLD_SIZE`, `ABORTED`
   */
  async enableParallelism(config: TensorParallelConfig, options: SplitOptions = {}): Promise<void> {
    const runtime = this.#loaded()
    const { type } = runtime
    checkParallelConfig(type.name, config)
    if (runtime.isParallel) {
      throw new RankwiseError('PARALLEL_ALREADY', 'the model is split already', {
        where: type.name,
        actual: { tpDegree: runtime.tpDegree },
        rule: 'a model is split once',
        remedy: 'load it again with another degree',
      })
    }
    const { tpDegree } = config
    const placements = checkPlan(type, this, tpDegree, true)
    const collectives = collectivesFor(type.name, tpDegree)
    const split = await splitWeights(type.name, runtime, {
      ...options,
      placements,
      tpDegree,
      rank: collectives?.rank ?? 0,
    })
    await this.#executors.dispose()
    for (const [name, weight] of runtime.weights) {
      if (split.weights.get(name) !== weight) weight.dispose()
    }
    this.#runtime = { ...runtime, ...split, tpDegree, isParallel: true, placements, collectives }
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
    const weights = this.#runtime?.weights
    this.#runtime = undefined
    await this.#executors.dispose()
    for (const weight of weights?.values() ?? []) weight.dispose()
  }

  /** `dispose`, for `await using`. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.dispose()
  }

  /**
   * This rank's shard of a weight, on the host, in the dtype it is held in.
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
    const compile = async () => {
      const graph = trace(`${this.constructor.name}.${method}`, this, inputs, forward, dtype)
      return GraphExecutor.compile(partition(graph, placements, tpDegree), { backend, collectives, weights })
    }
    return this.#executors.use(key, compile, (executor) => executor.run(inputs, options))
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

function checkDtype(model: string, backend: Backend, dtype: DType): void {
  if (backend.supports.dtypes.includes(dtype)) return
  throw new RankwiseError('DTYPE_UNSUPPORTED', `the backend ${backend.name} does not compute in ${dtype}`, {
    where: model,
    actual: { dtype, supported: backend.supports.dtypes },
    rule: 'dtype is one that the backend computes in; weights stored in another are cast after slicing',
  })
}

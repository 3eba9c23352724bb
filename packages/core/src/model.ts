import type { DeviceTensor } from './backend.ts'
import { checkPlan, collectivesFor, joinedCollectives, type PlannedClass, type PlannedModel } from './check-plan.ts'
import type { Collectives } from './collectives.ts'
import type { DType } from './dtype.ts'
import { RankwiseError } from './errors.ts'
import { GraphExecutor, type RunInput, type RunOptions, type RunResult } from './executor.ts'
import { ExecutorCache } from './executor-cache.ts'
import type { Graph } from './graph.ts'
import { openPretrained } from './hub/index.ts'
import { type FromFirst, loadTogether, type SayOptions } from './load-agreement.ts'
import { checkDtype, DEFAULT_DTYPE, DEFAULT_WEIGHTS_NAME, loadModel, type Runtime } from './load-model.ts'
import type { LoadReport, LoadWeightsOptions } from './load-weights.ts'
import { Module } from './module.ts'
import type { TensorParallelConfig } from './parallel-config.ts'
import { partition } from './partition.ts'
import { formatPlacement } from './placement.ts'
import { checkOptions, checkParallelConfig, type FromPretrainedOptions, hubOptionsOf } from './pretrained-options.ts'
import { profiled } from './profile/index.ts'
import { RetainedTensor } from './retained-tensor.ts'
import { type SaveModelOptions, type SaveOptions, saveModel, saveShards } from './save/index.ts'
import { type SplitOptions, splitWeights } from './split-weights.ts'
import type { Tensor } from './tensor.ts'
import type { TracedTensor } from './traced-tensor.ts'
import { trace } from './tracer.ts'
import { turns } from './turns.ts'

/** A model class, as `fromPretrained` and reports need it. */
export interface ModelClass<M extends ModelMixin> extends PlannedClass {
  /** Base name of the weight files. @default 'diffusion_pytorch_model' */
  readonly weightsName?: string
  /** Weights that a checkpoint may have and this class does not use. */
  readonly ignoredWeights?: readonly RegExp[]
  /**
   * Parameters that are the same weight as another, by name: a checkpoint may have the tensor under either name, or
   * under both. @default none
   */
  readonly tiedWeights?: LoadWeightsOptions['tied']
  /** Builds the model without weights. @throws RankwiseError `CONFIG_INVALID` */
  fromConfig(config: unknown): M
}

/** Options of `saveShards`. */
export type SaveProgressOptions = Pick<SaveOptions, 'signal' | 'onProgress'>

/** Options of `savePretrained`. */
export interface SavePretrainedOptions extends SaveProgressOptions {
  /** Most bytes of one file, as a number or like `'5GB'`. @default '10GB' */
  readonly maxShardSize?: SaveModelOptions['maxShardSize']
}

/** A model that loads its weights from a checkpoint folder and runs on a backend, whole or split over ranks. */
export abstract class ModelMixin extends Module implements PlannedModel {
  #runtime: Runtime | undefined
  #isSplitting = false
  readonly #executors = new ExecutorCache()

  /** Number of attention heads, which a tensor-parallel degree has to divide; undefined where there are none. */
  get numAttentionHeads(): number | undefined {
    return undefined
  }

  /** The model at small shapes: enough to check every placement before weights are read. */
  abstract traceExample(): Graph

  /**
   * Loads a model from a folder as diffusers writes it. Options, config, plan, degree, placements and the headers of the
   * weight files are checked before any weight is read; then every rank reads only its own slices. The ranks of a group
   * load together or not at all.
   *
   * @param pathOrId - folder of the model or, with `subfolder`, of its pipeline; or the id of either on a hub, `org/name`
   * @throws RankwiseError `OPTION_UNKNOWN`, `OPTION_INVALID`, `*_UNSUPPORTED`, `CONFIG_NOT_FOUND`, `CONFIG_INVALID`,
   *   `DTYPE_UNSUPPORTED`, `PLAN_*`, `HEADS_NOT_DIVISIBLE`, `BLOCK_NOT_DIVISIBLE`, `PLACEMENT_*`,
   *   `PROCESS_GROUP_NOT_INITIALIZED`, `TP_DEGREE_WORLD_SIZE`, `WEIGHTS_*`, `CHECKPOINT_*`, `SAFETENSORS_*`,
   *   `LOAD_FAILED_ELSEWHERE`, `LOAD_DIFFERS`, `HUB_*`, `ABORTED`
   */
  static async fromPretrained<M extends ModelMixin>(
    this: ModelClass<M>,
    pathOrId: string,
    options: FromPretrainedOptions,
  ): Promise<M> {
    // Not all callers have types: without options, it is the missing backend that is refused.
    const given = (options ?? {}) as FromPretrainedOptions
    // All that can fail, fails in the load: the other ranks hear of that.
    const load = async (signal: AbortSignal, fromFirst: FromFirst, sayOptions: SayOptions) => {
      checkOptions(this.name, given)
      const { backend, dtype = DEFAULT_DTYPE } = given
      checkDtype(this.name, backend, dtype)
      sayOptions({ dtype })
      const repository = await openPretrained(pathOrId, { ...hubOptionsOf(given), signal, fromFirst })
      return loadModel(this, repository ?? pathOrId, { ...given, signal })
    }
    const { model, runtime } = await profiled({ category: 'stage', name: `load ${this.name}` }, () =>
      loadTogether(load, {
        collectives: joinedCollectives(given.parallelConfig?.tpDegree ?? 1),
        // What is no signal is refused in the load.
        signal: given.signal instanceof AbortSignal ? given.signal : undefined,
        within: typeof given.within === 'function' ? given.within : undefined,
        release: ({ runtime }) => disposeWeights(runtime),
      }),
    )
    model.#runtime = runtime
    return model
  }

  /**
   * Splits a model that is loaded whole over the ranks of the process group: the same slices as loading it split. When
   * it fails, the model is as it was; when it succeeds, the whole weights are freed.
   *
   * @throws RankwiseError `MODEL_NOT_LOADED`, `PARALLEL_ALREADY`, `PARALLEL_CONFIG_INVALID`,
   *   `CONTEXT_PARALLEL_UNSUPPORTED`, `PLAN_*`, `HEADS_NOT_DIVISIBLE`, `BLOCK_NOT_DIVISIBLE`, `PLACEMENT_*`,
   *   `PROCESS_GROUP_NOT_INITIALIZED`, `TP_DEGREE_WORLD_SIZE`, `LOAD_FAILED_ELSEWHERE`, `ABORTED`
   */
  async enableParallelism(config: TensorParallelConfig, options: SplitOptions = {}): Promise<void> {
    const split = await loadTogether((signal) => this.#split(config, { ...options, signal }), {
      collectives: joinedCollectives((config as TensorParallelConfig | undefined)?.tpDegree ?? 1),
      signal: options.signal,
      release: ({ whole, runtime }) => disposeSplit(runtime.weights, whole.weights),
    })
    const { whole, runtime } = split
    if (this.#runtime !== whole) {
      disposeSplit(runtime.weights, whole.weights)
      throw modelNotLoaded(whole.type.name)
    }
    this.#runtime = runtime
    // What runs from here on must not find what was compiled for the whole weights.
    await this.#executors.dispose()
    disposeSplit(whole.weights, runtime.weights)
  }

  /**
   * Writes a model that is not split as diffusers does: `config.json` and safetensors, several with an index where they
   * would be larger than `maxShardSize`. The folder has all of it or what it had before.
   *
   * @throws RankwiseError `MODEL_NOT_LOADED`, `SAVE_PARALLEL`, `SAVE_*`, `ABORTED`
   */
  async savePretrained(directory: string, options: SavePretrainedOptions = {}): Promise<void> {
    const runtime = this.#loaded()
    if (runtime.isParallel) {
      throw new RankwiseError('SAVE_PARALLEL', 'a rank of a split model has only its own slices', {
        where: runtime.type.name,
        actual: { tpDegree: runtime.tpDegree },
        rule: 'a whole model is saved before it is split',
        remedy: 'use saveShards, which any other degree can load',
      })
    }
    const { maxShardSize, ...common } = options
    await saveModel(directory, {
      ...this.#saveOptions(runtime, common),
      ...(maxShardSize === undefined ? {} : { maxShardSize }),
    })
  }

  /**
   * Writes a model as the slices of its ranks, with a manifest: `fromPretrained` loads it at any legal degree. All ranks
   * call it with the same folder, which has all of it or what it had before.
   *
   * @throws RankwiseError `MODEL_NOT_LOADED`, `SAVE_*`, `ABORTED`, and those of the collectives
   */
  async saveShards(directory: string, options: SaveProgressOptions = {}): Promise<void> {
    const runtime = this.#loaded()
    const { placements, collectives } = runtime
    using _turn = await turns.take(collectives)
    await saveShards(directory, { ...this.#saveOptions(runtime, options), placements, collectives })
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
    if (weights !== undefined) disposeWeights({ weights })
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

  /**
   * Runs a forward on concrete tensors. It is traced, placed and compiled once per method and input shapes. Runs of split
   * models of one group follow each other in the order of the calls.
   */
  protected async execute<I extends Record<string, RunInput>>(
    method: string,
    inputs: I,
    forward: (inputs: { readonly [K in keyof I]: TracedTensor }) => Readonly<Record<string, TracedTensor>>,
    options?: RunOptions,
  ): Promise<Record<string, Tensor>> {
    return (await this.executeRetaining(method, inputs, [], forward, options)).outputs
  }

  /**
   * Runs a forward as `execute` does. Outputs that are named in `retained` stay on the backend, each rank's own part of
   * them, to be inputs of later runs; whoever calls it disposes of them.
   */
  protected async executeRetaining<I extends Record<string, RunInput>>(
    method: string,
    inputs: I,
    retained: readonly string[],
    forward: (inputs: { readonly [K in keyof I]: TracedTensor }) => Readonly<Record<string, TracedTensor>>,
    options?: RunOptions,
  ): Promise<RunResult> {
    const kept = Object.entries(inputs).flatMap(([name, input]) =>
      input instanceof RetainedTensor ? ([[name, input.placement]] as const) : [],
    )
    const shapes = Object.entries(inputs).map(([name, { dtype, shape }]) => `${name}:${dtype}[${shape.join()}]`)
    const split = kept.map(([name, placement]) => `${name}:${formatPlacement(placement)}`)
    const key = [method, ...shapes, ...split].join(' ')
    using _turn = await turns.take(this.#loaded().collectives)
    // Not before: whoever had the turn may have split the model.
    const { backend, collectives, weights, dtype, placements, tpDegree } = this.#loaded()
    const name = `${this.constructor.name}.${method}`
    const compile = () =>
      profiled({ category: 'compile', name, graph: name }, async () => {
        const graph = trace(name, this, inputs, forward, dtype)
        const placed = partition(graph, placements, tpDegree, { inputs: new Map(kept), retained })
        return GraphExecutor.compile(placed, { backend, collectives, weights })
      })
    // Awaited here: the turn ends with the function.
    return await this.#executors.use(key, compile, (executor) => executor.runRetaining(inputs, options))
  }

  /** This model split, while it stays whole. */
  async #split(config: TensorParallelConfig, options: SplitOptions): Promise<{ whole: Runtime; runtime: Runtime }> {
    const whole = this.#loaded()
    const { type } = whole
    checkParallelConfig(type.name, config)
    if (whole.isParallel || this.#isSplitting) {
      throw new RankwiseError('PARALLEL_ALREADY', 'the model is split already', {
        where: type.name,
        actual: { tpDegree: whole.isParallel ? whole.tpDegree : 'being split' },
        rule: 'a model is split once',
        remedy: 'load it again with another degree',
      })
    }
    const { tpDegree } = config
    const placements = checkPlan(type, this, tpDegree, true)
    const collectives = collectivesFor(type.name, tpDegree)
    this.#isSplitting = true
    try {
      const split = await splitWeights(type.name, whole, {
        ...options,
        placements,
        tpDegree,
        rank: collectives?.rank ?? 0,
      })
      return { whole, runtime: { ...whole, ...split, tpDegree, isParallel: true, placements, collectives } }
    } finally {
      this.#isSplitting = false
    }
  }

  #saveOptions({ type, config, weights, backend }: Runtime, options: SaveProgressOptions) {
    const held = (name: string) => weights.get(name) as DeviceTensor
    const whole = [...this.namedParameters()].map(
      ([name, { shape }]) => [name, { dtype: held(name).dtype, shape }] as const,
    )
    return {
      ...options,
      component: type.name,
      config,
      weightsName: type.weightsName ?? DEFAULT_WEIGHTS_NAME,
      tensors: new Map(whole),
      read: (name: string) => backend.download(held(name)),
    }
  }

  #loaded(): Runtime {
    if (this.#runtime === undefined) throw modelNotLoaded(this.constructor.name)
    return this.#runtime
  }
}

function modelNotLoaded(model: string): RankwiseError {
  return new RankwiseError('MODEL_NOT_LOADED', 'the model has no weights', {
    where: model,
    remedy: 'load it with fromPretrained',
  })
}

function disposeWeights({ weights }: Pick<Runtime, 'weights'>): void {
  for (const weight of weights.values()) weight.dispose()
}

/** Frees those of `weights` that `kept` does not hold as well. */
function disposeSplit(weights: Runtime['weights'], kept: Runtime['weights']): void {
  const others = new Set(kept.values())
  for (const weight of weights.values()) if (!others.has(weight)) weight.dispose()
}

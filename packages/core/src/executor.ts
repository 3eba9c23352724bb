import { throwIfAborted } from './abort.ts'
import type { Backend, DeviceTensor, Executable } from './backend.ts'
import type { Collectives } from './collectives.ts'
import { DeviceValues } from './device-values.ts'
import { itemSize } from './dtype.ts'
import { RankwiseError } from './errors.ts'
import type { TensorType, Value } from './graph.ts'
import { opDefinition } from './op.ts'
import type { PlacedGraph, PlacedValue } from './partition.ts'
import { formatPlacement, type Placement, REPLICATED, samePlacement } from './placement.ts'
import { type ProfileActivity, profiled } from './profile/index.ts'
import { RetainedTensor } from './retained-tensor.ts'
import { type Segment, type Step, stepsOf } from './segment.ts'
import { sameShape, sizeOf, type Tensor } from './tensor.ts'

/** What a graph is executed with. */
export interface ExecutorOptions {
  readonly backend: Backend
  /** The group whose ranks hold the shards; undefined at degree 1. */
  readonly collectives: Collectives | undefined
  /** This rank's shard of every weight, by name. */
  readonly weights: ReadonlyMap<string, DeviceTensor>
}

/** What a run takes: a tensor of the host, or what an earlier run left behind. */
export type RunInput = Tensor | RetainedTensor

/** What a run gives. */
export interface RunResult {
  readonly outputs: Record<string, Tensor>
  /** Outputs that the graph says are retained; the caller disposes of them. */
  readonly retained: Record<string, RetainedTensor>
}

/** Options of one run. */
export interface RunOptions {
  /** Aborting it stops before the next segment, or inside an all-reduce, with `ABORTED`. */
  readonly signal?: AbortSignal | undefined
}

/** What runs a segment: an executable, which others may share, on weights of its own. */
interface BoundSegment {
  readonly executable: Executable
  readonly weights: readonly DeviceTensor[]
  readonly activity: ProfileActivity
}

type AllReduceStep = Extract<Step, { kind: 'all_reduce' }>

/** Runs one rank's part of a placed graph: segments on the backend, all-reduces between them. */
export class GraphExecutor {
  readonly #graph: PlacedGraph
  readonly #options: ExecutorOptions
  readonly #steps: readonly Step[]
  /** For every step, the values that no later step uses. */
  readonly #released: readonly (readonly number[])[]
  readonly #executables = new Map<string, Executable>()
  readonly #bound = new Map<Segment, BoundSegment>()

  private constructor(graph: PlacedGraph, options: ExecutorOptions) {
    this.#graph = graph
    this.#options = options
    this.#steps = stepsOf(graph, options.collectives?.rank ?? 0)
    this.#released = releasedAfter(this.#steps, graph)
  }

  /**
   * Compiles every distinct segment once.
   *
   * @throws RankwiseError `TP_DEGREE_WORLD_SIZE`, and those of the backend
   */
  static async compile(graph: PlacedGraph, options: ExecutorOptions): Promise<GraphExecutor> {
    requireWorldSize(graph, options.collectives?.worldSize ?? 1)
    const executor = new GraphExecutor(graph, options)
    try {
      for (const step of executor.#steps) {
        if (step.kind === 'segment') await executor.#compile(step.segment)
      }
    } catch (error) {
      await executor.dispose()
      throw error
    }
    return executor
  }

  /**
   * The outputs of `runRetaining`; what is retained is freed.
   *
   * @throws as `runRetaining`
   */
  async run(inputs: Readonly<Record<string, RunInput>>, options?: RunOptions): Promise<Record<string, Tensor>> {
    const { outputs, retained } = await this.runRetaining(inputs, options)
    for (const tensor of Object.values(retained)) tensor.dispose()
    return outputs
  }

  /**
   * A rank that fails once it has begun makes the others fail as well, instead of letting them wait for it: the group
   * cannot be used any more.
   *
   * @param inputs - one tensor per graph input, of the shape it was traced with; retained ones stay the caller's
   * @throws RankwiseError `INPUT_MISMATCH`, `ABORTED`, and those of the backend and the collectives
   */
  async runRetaining(inputs: Readonly<Record<string, RunInput>>, options: RunOptions = {}): Promise<RunResult> {
    const { name } = this.#graph
    return profiled({ category: 'run', name, graph: name }, () => this.#run(inputs, options))
  }

  async #run(inputs: Readonly<Record<string, RunInput>>, { signal }: RunOptions): Promise<RunResult> {
    const { backend } = this.#options
    refuseUnknown(this.#graph, inputs)
    const given = this.#graph.inputs.map((value) => [value.id, matchingInput(value, inputs)] as const)
    const values = new DeviceValues()
    try {
      for (const [id, input] of given) {
        if (input instanceof RetainedTensor) values.lend(id, input.local)
        else values.set(id, backend.upload(input))
      }
      for (const [i, step] of this.#steps.entries()) {
        throwIfAborted(signal)
        if (step.kind === 'segment') await this.#runSegment(step.segment, values)
        else await this.#allReduce(step, values, this.#released[i] ?? [], signal)
        for (const id of this.#released[i] ?? []) values.release(id)
      }
      return await this.#result(values)
    } catch (error) {
      this.#options.collectives?.abort(error as Error)
      throw error
    } finally {
      values.releaseAll()
    }
  }

  /** Frees the executables; idempotent. */
  async dispose(): Promise<void> {
    this.#bound.clear()
    for (const executable of this.#executables.values()) await executable.dispose()
    this.#executables.clear()
  }

  async #result(values: DeviceValues): Promise<RunResult> {
    const { outputs, retained } = this.#graph
    const result: RunResult = { outputs: {}, retained: {} }
    for (const [name, { id }] of Object.entries(outputs)) {
      if (!retained.includes(name)) result.outputs[name] = await this.#options.backend.download(values.at(id))
    }
    // Last: what fails above leaves nothing behind.
    for (const name of retained) {
      const { id, shape, placement } = outputs[name] as PlacedValue
      result.retained[name] = new RetainedTensor(shape, placement, values.keep(id))
    }
    return result
  }

  /** Segments of equal structure whose weights are stored alike share one executable. */
  async #compile(segment: Segment): Promise<void> {
    const weights = this.#weightsOf(segment)
    const key = executableKey(segment, weights)
    const executable = this.#executables.get(key) ?? (await this.#options.backend.compile(segment, weights))
    this.#executables.set(key, executable)
    this.#bound.set(segment, { executable, weights, activity: activityOf(segment, this.#graph.name) })
  }

  async #runSegment(segment: Segment, values: DeviceValues): Promise<void> {
    const bound = this.#bound.get(segment)
    if (bound === undefined) {
      throw new RankwiseError('EXECUTOR_DISPOSED', 'the model was disposed', { where: this.#graph.name })
    }
    const inputs = segment.inputs.map((input) => values.at(input.id))
    const { executable, weights, activity } = bound
    const outputs = await profiled(activity, () => executable.run(inputs, weights))
    for (const [i, output] of segment.outputs.entries()) values.set(output.id, outputs[i] as DeviceTensor)
  }

  /** Sums partial values over the ranks; with one rank, the part is the sum. */
  async #allReduce(
    { inputs: partials, outputs: sums }: AllReduceStep,
    values: DeviceValues,
    released: readonly number[],
    signal: AbortSignal | undefined,
  ): Promise<void> {
    const { backend, collectives } = this.#options
    if (collectives === undefined) {
      for (const [i, partial] of partials.entries()) values.set((sums[i] as Value).id, values.at(partial.id))
      return
    }
    const bytes = partials.reduce((sum, { dtype, shape }) => sum + itemSize(dtype) * sizeOf(shape), 0)
    await profiled({ category: 'all_reduce', name: 'all_reduce', graph: this.#graph.name, bytes }, async () => {
      const parts = partials.map(({ id }) => values.at(id))
      // Where the parts are not needed any more, the sums are written over them.
      const isInPlace =
        partials.every(({ id }) => released.includes(id)) && (await reduceInPlace(parts, backend, collectives, signal))
      const summed = isInPlace ? parts : await this.#reduceCopies(partials, values, released, { collectives, signal })
      for (const [i, sum] of summed.entries()) values.set((sums[i] as Value).id, sum)
    })
  }

  async #reduceCopies(
    partials: readonly Value[],
    values: DeviceValues,
    released: readonly number[],
    { collectives, signal }: { readonly collectives: Collectives; readonly signal: AbortSignal | undefined },
  ): Promise<readonly DeviceTensor[]> {
    const tensors = await this.#copiesOf(partials, values, released)
    await collectives.allReduce(tensors, { signal })
    return tensors.map((tensor) => this.#options.backend.upload(tensor))
  }

  /** Partial values on the host, to be written to. */
  async #copiesOf(
    partials: readonly Value[],
    values: DeviceValues,
    released: readonly number[],
  ): Promise<readonly Tensor[]> {
    return Promise.all(
      partials.map(async ({ id }) => {
        const tensor = await this.#options.backend.download(values.at(id))
        // The sum is written over the part, which a later linear operation may still need.
        return released.includes(id) ? tensor : tensor.clone()
      }),
    )
  }

  #weightsOf(segment: Segment): readonly DeviceTensor[] {
    return segment.parameters.map(({ name = '' }) => {
      const weight = this.#options.weights.get(name)
      if (weight === undefined)
        throw new RankwiseError('WEIGHT_NOT_LOADED', 'the weight is not loaded', { where: name })
      return weight
    })
  }
}

/**
 * Writes the sums over the parts, without a copy: on a GPU where backend and collectives both have its memory, else in memory
 * of the host where the backend lends it.
 *
 * @returns false where there is no memory to write to; nothing was said to the other ranks then
 */
async function reduceInPlace(
  parts: readonly DeviceTensor[],
  backend: Backend,
  collectives: Collectives,
  signal: AbortSignal | undefined,
): Promise<boolean> {
  const { deviceMemory } = backend
  if (deviceMemory !== undefined && collectives.allReduceOnDevice !== undefined) {
    const buffers = parts.map((part) => deviceMemory.borrow(part))
    await collectives.allReduceOnDevice(buffers, { stream: deviceMemory.stream, signal })
    return true
  }
  if (backend.borrow === undefined) return false
  const tensors = parts.map((part) => (backend as Required<Pick<Backend, 'borrow'>>).borrow(part))
  await collectives.allReduce(tensors, { signal })
  return true
}

/** A segment by the modules that it begins and ends in, and what it costs. */
function activityOf({ nodes }: Segment, graph: string): ProfileActivity {
  const [first = '', last = ''] = [nodes[0]?.path, nodes.at(-1)?.path].map((path) => path || '(model)')
  const flops = nodes.reduce((sum, { op, inputs, outputs, attributes }) => {
    return sum + opDefinition(op).cost(inputs, outputs, attributes).flops
  }, 0)
  return { category: 'segment', name: first === last ? first : `${first} … ${last}`, graph, flops }
}

function requireWorldSize({ name, tpDegree }: PlacedGraph, worldSize: number): void {
  if (tpDegree === worldSize) return
  throw new RankwiseError('TP_DEGREE_WORLD_SIZE', `a graph of degree ${tpDegree} in a group of ${worldSize} ranks`, {
    where: name,
    actual: { tpDegree, worldSize },
    rule: 'the degree that a graph is partitioned for is the size of the group that runs it',
  })
}

function refuseUnknown(graph: PlacedGraph, inputs: Readonly<Record<string, RunInput>>): void {
  const known = graph.inputs.map((value) => value.name)
  const unknown = Object.keys(inputs).find((name) => !known.includes(name))
  if (unknown === undefined) return
  throw new RankwiseError('INPUT_MISMATCH', `the traced graph has no input '${unknown}'`, {
    where: unknown,
    actual: { known },
    rule: 'inputs are those of the traced graph',
  })
}

function executableKey({ key }: Segment, weights: readonly DeviceTensor[]): string {
  return `${key} ${weights.map(({ storage, dtype }) => storage ?? dtype).join()}`
}

function matchingInput(value: PlacedValue, inputs: Readonly<Record<string, RunInput>>): RunInput {
  const name = value.name ?? ''
  const input = inputs[name]
  const placement = input instanceof RetainedTensor ? input.placement : REPLICATED
  const fits = input?.dtype === value.dtype && sameShape(input.shape, value.shape)
  if (input === undefined || !fits || !samePlacement(placement, value.placement)) {
    const typed = (type: TensorType, placed: Placement) =>
      `${type.dtype}[${type.shape.join(', ')}] ${formatPlacement(placed)}`
    throw new RankwiseError('INPUT_MISMATCH', `the input '${name}' does not fit the traced graph`, {
      where: name,
      actual: {
        given: input === undefined ? 'nothing' : typed(input, placement),
        traced: typed(value, value.placement),
      },
      rule: 'inputs have the dtype, shape and placement they were traced with',
    })
  }
  return input
}

function releasedAfter(steps: readonly Step[], graph: PlacedGraph): readonly (readonly number[])[] {
  const kept = new Set(Object.values(graph.outputs).map((value) => value.id))
  const lastUse = new Map<number, number>()
  for (const [i, step] of steps.entries()) {
    for (const value of step.kind === 'segment' ? step.segment.inputs : step.inputs) lastUse.set(value.id, i)
  }
  const released: number[][] = steps.map(() => [])
  for (const [id, step] of lastUse) {
    if (!kept.has(id)) released[step]?.push(id)
  }
  return released
}

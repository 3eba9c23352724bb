import {
  type DeviceTensor,
  type Executable,
  RankwiseError,
  type Segment,
  sameShape,
  type TensorType,
  type Value,
} from '@rankwise/core'
import type { Engine, Session } from './engine/engine.ts'
import { computeDType } from './host-dtype.ts'
import { lowerSegment, type WeightRows } from './lowering/lower-segment.ts'
import { formatStorage, type WeightStorage, wholeStorage } from './weight-storage.ts'

/** What a run reads, in memory of `M`. */
interface Readable extends DeviceTensor {
  /** Rejects if its content did not come to where it is. @default it is there */
  readonly ready?: Promise<void> | undefined
  /** Keeps the memory as it is until `release`, also when the tensor is disposed before. */
  retain(): void
  release(): void
}

/** An input of a run. */
export interface ReadableValue<M> extends Readable {
  /** The memory. @throws RankwiseError `TENSOR_DISPOSED` */
  readonly tensor: M
}

/** A weight of a run. */
export interface ReadableWeight<M> extends Readable {
  readonly layout: WeightStorage
  readonly storage: string
  /** Rows `start` to `end` (exclusive), which lie in one piece; not a copy. @throws RankwiseError `TENSOR_DISPOSED` */
  rows(start: number, end: number): M
}

/** The tensors of a device. */
export interface Tensors<M, V extends ReadableValue<M> = ReadableValue<M>> {
  /** @throws RankwiseError `TENSOR_FOREIGN` */
  value(tensor: DeviceTensor): V
  /** Undefined when the tensor holds no weight. @throws RankwiseError `TENSOR_FOREIGN`, `TENSOR_DISPOSED` */
  weight(tensor: DeviceTensor): ReadableWeight<M> | undefined
  result(memory: M): DeviceTensor
  /** Refuses inputs of a run for their content, where the engine would not. */
  checkInputs?(values: readonly V[]): void
}

/** How a segment is compiled. */
export interface CompileOptions<M extends TensorType, V extends ReadableValue<M>> {
  readonly engine: Engine<M>
  readonly tensors: Tensors<M, V>
  /** Weights that the first run takes. @default weights that are whole and in the dtype that they are computed in */
  readonly parameters?: readonly DeviceTensor[] | undefined
  readonly onDispose: (executable: OrtExecutable) => void
}

interface Compiled<M, V extends ReadableValue<M>> {
  readonly segment: Segment
  /** Of the segment's parameters. */
  readonly storages: readonly string[]
  readonly tensors: Tensors<M, V>
  readonly session: Session<M>
  /** What the session takes after the segment's inputs. */
  readonly weightInputs: readonly WeightRows[]
}

type Runner = Executable['run']

/** A compiled segment: one session, with the weights as inputs. */
export class OrtExecutable implements Executable {
  readonly #run: Runner
  readonly #release: () => Promise<void>
  readonly #onDispose: (executable: OrtExecutable) => void
  readonly #running = new Set<Promise<unknown>>()
  #disposing: Promise<void> | undefined

  private constructor(run: Runner, release: () => Promise<void>, onDispose: (executable: OrtExecutable) => void) {
    this.#run = run
    this.#release = release
    this.#onDispose = onDispose
  }

  /** @throws RankwiseError `OP_UNSUPPORTED`, `DTYPE_UNSUPPORTED`, `ARGUMENT_MISMATCH`, `TENSOR_FOREIGN`, `ORT_COMPILE` */
  static async compile<M extends TensorType, V extends ReadableValue<M>>(
    segment: Segment,
    options: CompileOptions<M, V>,
  ): Promise<OrtExecutable> {
    const { engine, tensors, parameters, onDispose } = options
    const storages =
      parameters === undefined
        ? segment.parameters.map(({ dtype, shape, name = 'a weight' }) =>
            wholeStorage(computeDType(dtype, name), shape),
          )
        : weightsFor(segment, tensors, parameters).map(({ layout }) => layout)
    const { model, weightInputs } = lowerSegment(segment, storages, { target: engine.target })
    const session = await engine.createSession(model)
    const compiled = { segment, storages: storages.map(formatStorage), tensors, session, weightInputs }
    const run: Runner = (inputs, weights) => runOnce(compiled, inputs, weights)
    return new OrtExecutable(run, () => session.release(), onDispose)
  }

  /**
   * Runs once. An error names the block that the segment was compiled for, also when it runs with the weights of another.
   * What is disposed meanwhile stays where it is until the run has ended.
   *
   * @throws RankwiseError `EXECUTABLE_DISPOSED`, `ARGUMENT_MISMATCH`, also for weights that are stored otherwise than those
   *   it was compiled for, `TENSOR_DISPOSED`, `TENSOR_FOREIGN`, `ORT_RUN`, `ORT_SHAPE`
   */
  async run(inputs: readonly DeviceTensor[], parameters: readonly DeviceTensor[]): Promise<readonly DeviceTensor[]> {
    if (this.#disposing !== undefined)
      throw new RankwiseError('EXECUTABLE_DISPOSED', 'the compiled segment was disposed')
    const running = this.#run(inputs, parameters)
    this.#running.add(running)
    try {
      return await running
    } finally {
      this.#running.delete(running)
    }
  }

  /** Waits for runs that are under way; idempotent. */
  async dispose(): Promise<void> {
    this.#disposing ??= this.#free()
    await this.#disposing
  }

  async #free(): Promise<void> {
    await Promise.allSettled(this.#running)
    await this.#release()
    this.#onDispose(this)
  }
}

async function runOnce<M extends TensorType, V extends ReadableValue<M>>(
  { segment, storages, tensors, session, weightInputs }: Compiled<M, V>,
  inputs: readonly DeviceTensor[],
  parameters: readonly DeviceTensor[],
): Promise<readonly DeviceTensor[]> {
  const values = inputsFor(segment, tensors, inputs)
  tensors.checkInputs?.(values)
  const weights = weightsFor(segment, tensors, parameters, storages)
  const rows = weightInputs.map(({ parameter, start, end }) =>
    (weights[parameter] as ReadableWeight<M>).rows(start, end),
  )
  const memory = [...values.map(({ tensor }) => tensor), ...rows]
  const arguments_: readonly Readable[] = [...values, ...weights]
  for (const argument of arguments_) argument.retain()
  try {
    for (const { ready } of arguments_) if (ready !== undefined) await ready
    const results = await session.run(memory)
    return results.map((result) => tensors.result(result))
  } finally {
    for (const argument of arguments_) argument.release()
  }
}

/** The values of a segment's inputs. @throws RankwiseError `ARGUMENT_MISMATCH`, `TENSOR_DISPOSED`, `TENSOR_FOREIGN` */
function inputsFor<M extends TensorType, V extends ReadableValue<M>>(
  { inputs }: Segment,
  tensors: Tensors<M, V>,
  given: readonly DeviceTensor[],
): readonly V[] {
  requireCount('input', inputs, given)
  return inputs.map((value, i) => {
    const readable = tensors.value(given[i] as DeviceTensor)
    const { tensor } = readable
    if (tensor.dtype === value.dtype && sameShape(tensor.shape, value.shape)) return readable
    throw mismatch(value.name ?? `input ${i}`, { given: typeText(tensor), compiled: typeText(value) })
  })
}

/**
 * The weights of a segment's parameters.
 *
 * @param storages - that they have to have. @default any
 * @throws RankwiseError `ARGUMENT_MISMATCH`, `TENSOR_DISPOSED`, `TENSOR_FOREIGN`
 */
function weightsFor<M>(
  { parameters }: Segment,
  tensors: Pick<Tensors<M>, 'weight'>,
  given: readonly DeviceTensor[],
  storages?: readonly string[],
): readonly ReadableWeight<M>[] {
  requireCount('parameter', parameters, given)
  return parameters.map((value, i) => {
    const tensor = given[i] as DeviceTensor
    const weight = tensors.weight(tensor)
    const storage = storages?.[i] ?? weight?.storage
    if (weight?.storage === storage && weight !== undefined && sameShape(weight.shape, value.shape)) return weight
    const compiled = typeText({ shape: value.shape, dtype: value.dtype, ...(storage === undefined ? {} : { storage }) })
    throw mismatch(value.name ?? `parameter ${i}`, { given: typeText(tensor), compiled })
  })
}

function requireCount(kind: string, values: readonly Value[], given: readonly DeviceTensor[]): void {
  if (given.length === values.length) return
  throw new RankwiseError('ARGUMENT_MISMATCH', `a segment takes ${values.length} ${kind}s, not ${given.length}`)
}

function mismatch(where: string, actual: { readonly given: string; readonly compiled: string }): RankwiseError {
  return new RankwiseError('ARGUMENT_MISMATCH', 'an argument is not what the segment was compiled for', {
    where,
    actual,
    rule: 'shapes, dtypes and the storage of weights are those that a segment was compiled for',
  })
}

function typeText({ storage, dtype, shape }: Pick<DeviceTensor, 'storage' | 'dtype' | 'shape'>): string {
  return `${storage ?? dtype}[${shape.join(', ')}]`
}

import { type DeviceTensor, type Executable, RankwiseError, type Segment, sameShape, type Value } from '@rankwise/core'
import type { Engine, Session } from './engine/engine.ts'
import { computeDType } from './host-dtype.ts'
import { HostTensor } from './host-tensor.ts'
import { lowerSegment, type WeightRows } from './lowering/lower-segment.ts'
import { formatStorage, wholeStorage } from './weight-storage.ts'
import { WeightTensor } from './weight-tensor.ts'

/** How a segment is compiled. */
export interface CompileOptions {
  readonly engine: Engine
  /** Weights that the first run takes. @default weights that are whole and in the dtype that they are computed in */
  readonly parameters?: readonly DeviceTensor[] | undefined
  readonly onDispose: (executable: OrtExecutable) => void
}

interface Compiled {
  readonly segment: Segment
  /** Of the segment's parameters. */
  readonly storages: readonly string[]
  readonly engine: Engine
  readonly session: Session
  /** What the session takes after the segment's inputs. */
  readonly weightInputs: readonly WeightRows[]
}

/** A compiled segment: one session, with the weights as inputs. */
export class OrtExecutable implements Executable {
  readonly #compiled: Compiled
  readonly #onDispose: (executable: OrtExecutable) => void
  readonly #running = new Set<Promise<unknown>>()
  #disposing: Promise<void> | undefined

  private constructor(compiled: Compiled, onDispose: (executable: OrtExecutable) => void) {
    this.#compiled = compiled
    this.#onDispose = onDispose
  }

  /** @throws RankwiseError `OP_UNSUPPORTED`, `DTYPE_UNSUPPORTED`, `ARGUMENT_MISMATCH`, `TENSOR_FOREIGN`, `ORT_COMPILE` */
  static async compile(segment: Segment, options: CompileOptions): Promise<OrtExecutable> {
    const { engine, parameters, onDispose } = options
    const storages =
      parameters === undefined
        ? segment.parameters.map(({ dtype, shape, name = 'a weight' }) =>
            wholeStorage(computeDType(dtype, name), shape),
          )
        : weightsFor(segment, parameters).map(({ layout }) => layout)
    const { model, weightInputs } = lowerSegment(segment, storages, { target: engine.target })
    const session = await engine.createSession(model)
    const compiled = { segment, storages: storages.map(formatStorage), engine, session, weightInputs }
    return new OrtExecutable(compiled, onDispose)
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
    await this.#compiled.session.release()
    this.#onDispose(this)
  }

  async #run(inputs: readonly DeviceTensor[], parameters: readonly DeviceTensor[]): Promise<readonly DeviceTensor[]> {
    const { segment, storages, engine, session, weightInputs } = this.#compiled
    const values = inputsFor(segment, inputs)
    const weights = weightsFor(segment, parameters, storages)
    const rows = weightInputs.map(({ parameter, start, end }) => (weights[parameter] as WeightTensor).rows(start, end))
    const arguments_ = [...values, ...weights]
    for (const argument of arguments_) argument.retain()
    try {
      const results = await session.run([...values.map(({ tensor }) => tensor), ...rows])
      return results.map((result) => new HostTensor(result, (tensor) => engine.recycle(tensor)))
    } finally {
      for (const argument of arguments_) argument.release()
    }
  }
}

/** The values of a segment's inputs. @throws RankwiseError `ARGUMENT_MISMATCH`, `TENSOR_DISPOSED`, `TENSOR_FOREIGN` */
function inputsFor({ inputs }: Segment, given: readonly DeviceTensor[]): readonly HostTensor[] {
  requireCount('input', inputs, given)
  return inputs.map((value, i) => {
    const host = HostTensor.from(given[i] as DeviceTensor)
    const { tensor } = host
    if (tensor.dtype === value.dtype && sameShape(tensor.shape, value.shape)) return host
    throw mismatch(value.name ?? `input ${i}`, { given: typeText(tensor), compiled: typeText(value) })
  })
}

/**
 * The weights of a segment's parameters.
 *
 * @param storages - that they have to have. @default any
 * @throws RankwiseError `ARGUMENT_MISMATCH`, `TENSOR_DISPOSED`, `TENSOR_FOREIGN`
 */
function weightsFor(
  { parameters }: Segment,
  given: readonly DeviceTensor[],
  storages?: readonly string[],
): readonly WeightTensor[] {
  requireCount('parameter', parameters, given)
  return parameters.map((value, i) => {
    const tensor = given[i] as DeviceTensor
    const weight = WeightTensor.from(tensor)
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

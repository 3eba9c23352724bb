import {
  type DeviceTensor,
  type Executable,
  RankwiseError,
  type Segment,
  sameShape,
  type Tensor,
  type Value,
} from '@rankwise/core'
import { HostTensor } from './host-tensor.ts'
import { lowerSegment } from './lowering/lower-segment.ts'
import { OrtSession, type SessionOptions } from './session.ts'

/** A compiled segment: one session, with the weights as inputs. */
export class OrtExecutable implements Executable {
  readonly #segment: Segment
  readonly #session: OrtSession
  readonly #onDispose: (executable: OrtExecutable) => void
  readonly #running = new Set<Promise<unknown>>()
  #isDisposed = false

  private constructor(segment: Segment, session: OrtSession, onDispose: (executable: OrtExecutable) => void) {
    this.#segment = segment
    this.#session = session
    this.#onDispose = onDispose
  }

  /** @throws RankwiseError `OP_UNSUPPORTED`, `DTYPE_UNSUPPORTED`, `ORT_COMPILE` */
  static async compile(
    segment: Segment,
    options: SessionOptions & { readonly onDispose: (executable: OrtExecutable) => void },
  ): Promise<OrtExecutable> {
    const session = await OrtSession.create(lowerSegment(segment), options)
    return new OrtExecutable(segment, session, options.onDispose)
  }

  /**
   * Runs once. An error names the block that the segment was compiled for, also when it runs with the weights of another.
   *
   * @throws RankwiseError `EXECUTABLE_DISPOSED`, `ARGUMENT_MISMATCH`, `TENSOR_DISPOSED`, `TENSOR_FOREIGN`, `ORT_RUN`,
   *   `ORT_SHAPE`
   */
  async run(inputs: readonly DeviceTensor[], parameters: readonly DeviceTensor[]): Promise<readonly DeviceTensor[]> {
    if (this.#isDisposed) throw new RankwiseError('EXECUTABLE_DISPOSED', 'the compiled segment was disposed')
    const { inputs: inputValues, parameters: parameterValues } = this.#segment
    const tensors = [...matching('input', inputValues, inputs), ...matching('parameter', parameterValues, parameters)]
    const running = this.#session.run(tensors)
    this.#running.add(running)
    try {
      return (await running).map((tensor) => new HostTensor(tensor))
    } finally {
      this.#running.delete(running)
    }
  }

  /** Waits for runs that are under way; idempotent. */
  async dispose(): Promise<void> {
    if (this.#isDisposed) return
    this.#isDisposed = true
    await Promise.allSettled(this.#running)
    await this.#session.release()
    this.#onDispose(this)
  }
}

/** The arguments' tensors, if they are what the segment was compiled for. */
function matching(kind: string, values: readonly Value[], given: readonly DeviceTensor[]): readonly Tensor[] {
  if (given.length !== values.length) {
    throw new RankwiseError('ARGUMENT_MISMATCH', `a segment takes ${values.length} ${kind}s, not ${given.length}`)
  }
  return values.map((value, i) => {
    const { tensor } = HostTensor.from(given[i] as DeviceTensor)
    if (tensor.dtype === value.dtype && sameShape(tensor.shape, value.shape)) return tensor
    throw new RankwiseError('ARGUMENT_MISMATCH', `a ${kind} is not what the segment was compiled for`, {
      where: value.name ?? `${kind} ${i}`,
      actual: {
        given: `${tensor.dtype}[${tensor.shape.join(', ')}]`,
        compiled: `${value.dtype}[${value.shape.join(', ')}]`,
      },
    })
  })
}

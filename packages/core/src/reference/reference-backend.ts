import type { Backend, Capabilities, DeviceTensor, Executable, LoadShardOptions, MemoryReport } from '../backend.ts'
import type { ShardSource } from '../checkpoint/shard-source.ts'
import { type DType, isFloatingPoint } from '../dtype.ts'
import { RankwiseError } from '../errors.ts'
import type { Segment } from '../segment.ts'
import { checkArguments } from '../segment-arguments.ts'
import type { Shape, Tensor } from '../tensor.ts'
import { constantOf, evaluate, tensorOf, type Values } from './evaluate.ts'
import { hasReferenceOp } from './reference-op.ts'

/**
 * A backend that computes every operation in float64 with plain loops and rounds once, at the end of a segment. It is
 * for tests and debugging: correct and readable, orders of magnitude slower than a real one.
 */
export class ReferenceBackend implements Backend {
  readonly name = 'reference'
  readonly supports: Capabilities = { dtypes: ['float32', 'float64'] }
  readonly #weights = new Set<HostTensor>()
  readonly #executables = new Set<ReferenceExecutable>()
  #isDisposed = false

  /** @throws RankwiseError `DTYPE_UNSUPPORTED`, `BACKEND_DISPOSED`, and those of the source */
  async loadShard(source: ShardSource, { dtype, signal }: LoadShardOptions): Promise<DeviceTensor> {
    this.#requireAlive()
    this.#requireDType(dtype, source.name)
    const tensor = await source.read({ signal })
    this.#requireAlive()
    const weight = new HostTensor(tensor.cast(dtype), (freed) => this.#weights.delete(freed))
    this.#weights.add(weight)
    return weight
  }

  /** @throws RankwiseError `OP_UNSUPPORTED`, `DTYPE_UNSUPPORTED`, `ARGUMENT_MISMATCH`, `BACKEND_DISPOSED` */
  async compile(segment: Segment, parameters?: readonly DeviceTensor[]): Promise<Executable> {
    this.#requireAlive()
    for (const { op, path, outputs } of segment.nodes) {
      if (!hasReferenceOp(op)) {
        throw new RankwiseError('OP_UNSUPPORTED', `there is no reference for the operation '${op}'`, {
          where: path || '(model)',
          actual: { op },
        })
      }
      for (const { dtype } of outputs) if (isFloatingPoint(dtype)) this.#requireDType(dtype, path || '(model)')
    }
    if (parameters !== undefined) checkArguments(segment.parameters, parameters)
    const executable = new ReferenceExecutable(segment, (disposed) => this.#executables.delete(disposed))
    this.#executables.add(executable)
    return executable
  }

  /** @throws RankwiseError `BACKEND_DISPOSED` */
  upload(tensor: Tensor): DeviceTensor {
    this.#requireAlive()
    return new HostTensor(tensor)
  }

  /** The tensor itself, not a copy. @throws RankwiseError `TENSOR_DISPOSED`, `TENSOR_FOREIGN` */
  async download(tensor: DeviceTensor): Promise<Tensor> {
    return hostTensor(tensor)
  }

  memory(): MemoryReport {
    const weightBytes = [...this.#weights].reduce((sum, weight) => sum + hostTensor(weight).byteLength, 0)
    return { weightBytes, mappedBytes: 0, executables: this.#executables.size }
  }

  async dispose(): Promise<void> {
    this.#isDisposed = true
    for (const weight of this.#weights) weight.dispose()
    for (const executable of this.#executables) await executable.dispose()
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.dispose()
  }

  #requireAlive(): void {
    if (this.#isDisposed) throw new RankwiseError('BACKEND_DISPOSED', 'the reference backend was disposed')
  }

  #requireDType(dtype: DType, where: string): void {
    if (this.supports.dtypes.includes(dtype)) return
    throw new RankwiseError('DTYPE_UNSUPPORTED', `the reference backend does not compute in ${dtype}`, {
      where,
      actual: { dtype, supported: this.supports.dtypes },
    })
  }
}

class HostTensor implements DeviceTensor {
  readonly dtype: DType
  readonly shape: Shape
  readonly #onDispose: ((tensor: HostTensor) => void) | undefined
  #tensor: Tensor | undefined

  constructor(tensor: Tensor, onDispose?: (tensor: HostTensor) => void) {
    this.dtype = tensor.dtype
    this.shape = tensor.shape
    this.#tensor = tensor
    this.#onDispose = onDispose
  }

  get tensor(): Tensor {
    if (this.#tensor === undefined) {
      throw new RankwiseError('TENSOR_DISPOSED', 'the tensor was disposed', {
        actual: { dtype: this.dtype, shape: this.shape },
      })
    }
    return this.#tensor
  }

  dispose(): void {
    this.#tensor = undefined
    this.#onDispose?.(this)
  }
}

class ReferenceExecutable implements Executable {
  readonly #segment: Segment
  readonly #onDispose: (executable: ReferenceExecutable) => void
  #isDisposed = false

  constructor(segment: Segment, onDispose: (executable: ReferenceExecutable) => void) {
    this.#segment = segment
    this.#onDispose = onDispose
  }

  async run(inputs: readonly DeviceTensor[], parameters: readonly DeviceTensor[]): Promise<readonly DeviceTensor[]> {
    if (this.#isDisposed) throw new RankwiseError('EXECUTABLE_DISPOSED', 'the compiled segment was disposed')
    const segment = this.#segment
    checkArguments(segment.inputs, inputs)
    checkArguments(segment.parameters, parameters)
    const values: Values = new Map()
    for (const [i, value] of [...segment.inputs, ...segment.parameters].entries()) {
      values.set(value.id, hostTensor([...inputs, ...parameters][i] as DeviceTensor).cast('float64'))
    }
    for (const value of segment.constants) values.set(value.id, constantOf(value))
    for (const node of segment.nodes) evaluate(node, values)
    return segment.outputs.map((output) => new HostTensor(tensorOf(values, output).cast(output.dtype)))
  }

  async dispose(): Promise<void> {
    this.#isDisposed = true
    this.#onDispose(this)
  }
}

function hostTensor(tensor: DeviceTensor): Tensor {
  if (tensor instanceof HostTensor) return tensor.tensor
  throw new RankwiseError('TENSOR_FOREIGN', 'the tensor belongs to another backend', {
    rule: 'a backend computes with tensors that it made',
  })
}

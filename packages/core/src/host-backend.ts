import type { Backend, Capabilities, DeviceTensor, Executable, LoadShardOptions, MemoryReport } from './backend.ts'
import type { ShardSource } from './checkpoint/shard-source.ts'
import { type DType, isFloatingPoint } from './dtype.ts'
import { RankwiseError } from './errors.ts'
import type { Node } from './graph.ts'
import type { Segment } from './segment.ts'
import { checkArguments } from './segment-arguments.ts'
import type { Shape, Tensor } from './tensor.ts'

/** Tensors by the id of the value they are of. */
export type HostValues = ReadonlyMap<number, Tensor>

/**
 * A backend that computes in host memory, but for the computation: it loads, counts, checks and frees. A subclass says
 * which operations it has and what a segment gives. Backends with memory of their own implement `Backend` instead.
 */
export abstract class HostBackend implements Backend {
  abstract readonly name: string
  abstract readonly supports: Capabilities
  readonly #weights = new Set<HostTensor>()
  readonly #executables = new Set<HostExecutable>()
  #isDisposed = false

  /** Whether a segment may have the operation. */
  protected abstract hasOp(op: string): boolean

  /**
   * Computes a segment whose operations and dtypes were accepted.
   *
   * @param values - inputs, constants, and weights in the dtype that they are computed in; not to be written to
   * @returns the segment's outputs, in order, in memory that they share with nothing
   */
  protected abstract runSegment(segment: Segment, values: HostValues): readonly Tensor[]

  /** Reads a slice and casts it. @throws RankwiseError `DTYPE_UNSUPPORTED`, `BACKEND_DISPOSED`, and those of the source */
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
    for (const node of segment.nodes) this.#requireNode(node)
    if (parameters !== undefined) checkArguments(segment.parameters, parameters)
    const run = (values: HostValues) => this.runSegment(segment, values)
    const executable = new HostExecutable(segment, run, (disposed) => this.#executables.delete(disposed))
    this.#executables.add(executable)
    return executable
  }

  /** Shares the memory of `tensor`. @throws RankwiseError `BACKEND_DISPOSED` */
  upload(tensor: Tensor): DeviceTensor {
    this.#requireAlive()
    return new HostTensor(tensor)
  }

  /** The tensor itself, not a copy. @throws RankwiseError `TENSOR_DISPOSED`, `TENSOR_FOREIGN` */
  async download(tensor: DeviceTensor): Promise<Tensor> {
    return hostTensor(tensor)
  }

  /** The tensor itself, as `download` gives it. @throws RankwiseError `TENSOR_DISPOSED`, `TENSOR_FOREIGN` */
  borrow(tensor: DeviceTensor): Tensor {
    return hostTensor(tensor)
  }

  /** Weights that are loaded and segments that are compiled now. */
  memory(): MemoryReport {
    const weightBytes = [...this.#weights].reduce((sum, weight) => sum + hostTensor(weight).byteLength, 0)
    return { weightBytes, mappedBytes: 0, executables: this.#executables.size }
  }

  /** Frees weights and executables; idempotent. */
  async dispose(): Promise<void> {
    this.#isDisposed = true
    for (const weight of this.#weights) weight.dispose()
    for (const executable of this.#executables) await executable.dispose()
  }

  /** `dispose`, for `await using`. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.dispose()
  }

  #requireAlive(): void {
    if (this.#isDisposed) throw new RankwiseError('BACKEND_DISPOSED', `the backend ${this.name} was disposed`)
  }

  #requireNode({ op, path, outputs }: Node): void {
    if (!this.hasOp(op)) {
      throw new RankwiseError('OP_UNSUPPORTED', `the backend ${this.name} does not have the operation '${op}'`, {
        where: path || '(model)',
        actual: { op },
      })
    }
    for (const { dtype } of outputs) if (isFloatingPoint(dtype)) this.#requireDType(dtype, path || '(model)')
  }

  #requireDType(dtype: DType, where: string): void {
    if (this.supports.dtypes.includes(dtype)) return
    throw new RankwiseError('DTYPE_UNSUPPORTED', `the backend ${this.name} does not compute in ${dtype}`, {
      where,
      actual: { dtype, supported: this.supports.dtypes },
      rule: 'dtype is one that the backend computes in; weights stored in another are cast',
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

class HostExecutable implements Executable {
  readonly #segment: Segment
  readonly #run: (values: HostValues) => readonly Tensor[]
  readonly #onDispose: (executable: HostExecutable) => void
  #isDisposed = false

  constructor(
    segment: Segment,
    run: (values: HostValues) => readonly Tensor[],
    onDispose: (executable: HostExecutable) => void,
  ) {
    this.#segment = segment
    this.#run = run
    this.#onDispose = onDispose
  }

  async run(inputs: readonly DeviceTensor[], parameters: readonly DeviceTensor[]): Promise<readonly DeviceTensor[]> {
    if (this.#isDisposed) throw new RankwiseError('EXECUTABLE_DISPOSED', 'the compiled segment was disposed')
    checkArguments(this.#segment.inputs, inputs)
    checkArguments(this.#segment.parameters, parameters)
    const values = new Map<number, Tensor>()
    for (const [i, { id }] of this.#segment.inputs.entries()) values.set(id, hostTensor(inputs[i] as DeviceTensor))
    for (const [i, { id, dtype }] of this.#segment.parameters.entries()) {
      values.set(id, hostTensor(parameters[i] as DeviceTensor).cast(dtype))
    }
    for (const { id, data } of this.#segment.constants) values.set(id, data as Tensor)
    return this.#run(values).map((tensor) => new HostTensor(tensor))
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

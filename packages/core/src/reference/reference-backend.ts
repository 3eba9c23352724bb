import type { Backend, Capabilities, DeviceTensor, Executable, LoadShardOptions, MemoryReport } from '../backend.ts'
import type { ShardSource } from '../checkpoint/shard-source.ts'
import type { DType } from '../dtype.ts'
import { RankwiseError } from '../errors.ts'
import type { Segment } from '../segment.ts'
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

  async loadShard(source: ShardSource, { dtype, signal }: LoadShardOptions): Promise<DeviceTensor> {
    const tensor = await source.read({ signal })
    const weight = new HostTensor(tensor.cast(dtype), (freed) => this.#weights.delete(freed))
    this.#weights.add(weight)
    return weight
  }

  /** @throws RankwiseError `OP_UNKNOWN` */
  async compile(segment: Segment): Promise<Executable> {
    const unknown = segment.nodes.find((node) => !hasReferenceOp(node.op))
    if (unknown !== undefined) {
      throw new RankwiseError('OP_UNKNOWN', `there is no reference for the operation '${unknown.op}'`, {
        where: unknown.path || '(model)',
      })
    }
    const executable = new ReferenceExecutable(segment, (disposed) => this.#executables.delete(disposed))
    this.#executables.add(executable)
    return executable
  }

  upload(tensor: Tensor): DeviceTensor {
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
    for (const weight of this.#weights) weight.dispose()
    for (const executable of this.#executables) await executable.dispose()
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.dispose()
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

  constructor(segment: Segment, onDispose: (executable: ReferenceExecutable) => void) {
    this.#segment = segment
    this.#onDispose = onDispose
  }

  async run(inputs: readonly DeviceTensor[], parameters: readonly DeviceTensor[]): Promise<readonly DeviceTensor[]> {
    const segment = this.#segment
    const values: Values = new Map()
    for (const [i, value] of segment.inputs.entries()) values.set(value.id, hostTensor(inputs[i]).cast('float64'))
    for (const [i, value] of segment.parameters.entries())
      values.set(value.id, hostTensor(parameters[i]).cast('float64'))
    for (const value of segment.constants) values.set(value.id, constantOf(value))
    for (const node of segment.nodes) evaluate(node, values)
    return segment.outputs.map((output) => new HostTensor(tensorOf(values, output).cast(output.dtype)))
  }

  async dispose(): Promise<void> {
    this.#onDispose(this)
  }
}

function hostTensor(tensor: DeviceTensor | undefined): Tensor {
  if (tensor instanceof HostTensor) return tensor.tensor
  throw new RankwiseError('TENSOR_FOREIGN', 'the tensor belongs to another backend', {
    rule: 'a backend computes with tensors that it made',
  })
}
